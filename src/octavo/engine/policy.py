"""Who waits and who is next, who must give way when memory or slots are short, and how far one tenant or prompt may go.

A policy gives each request an *order*, a key that never changes: running requests are kept in it, and of two that cannot both run the later
one gives way. Whatever a policy prefers besides, the running request that comes first in the order is never preempted for want of blocks,
so it finishes, and so does all that is accepted.

Waiting requests stand in two rows, because a prompt that takes several steps may have to wait until another such prompt is computed, and
then short ones behind it pass. Only that lets anybody pass: one that waits for slots or blocks is waited for, else it might wait for ever.

This module does not know blocks, budgets, steps or clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Protocol

from octavo.contracts import GenerateRequest
from octavo.engine.queue import OrderedQueue
from octavo.engine.request import Order, Request

Held = Callable[[Request], bool]
"""Whether a long prompt must wait for others that are being computed."""

Size = Callable[[Request], float]
"""The share (0..1) of the machine that a running request takes, or that a waiting one would take."""

MOST_ADVANTAGE_S = 3600.0
"""What a priority is worth at most, in seconds of waiting."""


class Policy(Protocol):
    """The scheduler's questions. None may take time linear in the number of waiting requests."""

    def order(self, spec: GenerateRequest, number: int) -> Order:
        """The key of a request that arrives as the `number`-th."""
        ...

    def arrive(self, request: Request) -> None:
        """A new request waits."""
        ...

    def put_back(self, request: Request) -> None:
        """A request waits again: it was preempted, or its `is_long` is no more what it was."""
        ...

    def take(self, request: Request) -> None:
        """A waiting request waits no more."""
        ...

    def leave(self, request: Request) -> None:
        """A request that neither waits nor runs any more ended."""
        ...

    def peek(self, held: Held) -> Request | None:
        """The waiting one that shall run next, without the long ones that are held."""
        ...

    def ranked(self, partial: Iterable[Request]) -> list[Request]:
        """Partly computed running requests, in the order in which they may use what a step has left."""
        ...

    def is_ahead(self, other: Request, waiting: Request) -> bool:
        """Whether `waiting` must let `other` go first: as a long prompt that is being computed, or as one that was promised a slot."""
        ...

    def yielding(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        """Those that give way so that a waiting request can run, if that is enough for it: the first to yield first."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Who is preempted when a running request finds no block. `running` is in order and holds at least two."""
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """Notes that work was given to a request."""
        ...

    def num_held(self, partial: Sequence[Request], limit: int) -> int:
        """How many long prompts wait only because `limit` others, among those in `partial`, are being computed."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class Line:
    """Waiting requests by their order, long prompts in a row of their own."""

    def __init__(self) -> None:
        self._short = OrderedQueue()
        self._long = OrderedQueue()

    def add(self, request: Request) -> None:
        """Takes a request in."""
        (self._long if request.is_long else self._short).add(request, request.order)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        self._short.discard(request)
        self._long.discard(request)

    def peek(self, held: Held) -> Request | None:
        """The first in order, or the first short one if that one is held; None if that leaves nobody."""
        short, long = self._short.first, self._long.first
        if long is not None and (short is None or long < short) and not held(long[1]):
            return long[1]
        return None if short is None else short[1]

    @property
    def num_long(self) -> int:
        """Long ones among them."""
        return len(self._long)

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._short, self._long)


class FirstComeFirstServed:
    """By order of arrival. Nobody gives way to one that waits; of those that run, the last that arrived is preempted."""

    def __init__(self) -> None:
        self._line = Line()

    def order(self, spec: GenerateRequest, number: int) -> Order:
        """The number."""
        return (0.0, number)

    def arrive(self, request: Request) -> None:
        """Puts a new request behind those before it in the order."""
        self._line.add(request)

    def put_back(self, request: Request) -> None:
        """Puts a request where it would stand had it never run."""
        self._line.add(request)

    def take(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        self._line.remove(request)

    def leave(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def peek(self, held: Held) -> Request | None:
        """The first in order that is not held."""
        return self._line.peek(held)

    def ranked(self, partial: Iterable[Request]) -> list[Request]:
        """By order."""
        return sorted(partial, key=lambda request: request.order)

    def is_ahead(self, other: Request, waiting: Request) -> bool:
        """Every one before it in the order."""
        return other.order < waiting.order

    def yielding(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        """None."""
        return []

    def victim(self, running: Sequence[Request]) -> Request:
        """The last in order."""
        return running[-1]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Who got how much does not matter."""

    def num_held(self, partial: Sequence[Request], limit: int) -> int:
        """All long ones, once the limit is reached."""
        return self._line.num_long if len(partial) >= limit else 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)


class Priority(FirstComeFirstServed):
    """By `priority`, lower first, and among equals by arrival. One that waits makes those of less priority give way, if it must.

    `ageing_s` of waiting outweigh one level of priority. As all age alike, their order never changes, and a key made on arrival holds it:
    the arrival, put off by what the level is worth. That worth nears `MOST_ADVANTAGE_S` for extreme levels, so that none of them, however
    often it is asked for, keeps others waiting for ever.
    """

    def __init__(self, ageing_s: float) -> None:
        super().__init__()
        self._ageing_s = ageing_s

    def order(self, spec: GenerateRequest, number: int) -> Order:
        """Arrival in seconds, put off by the worth of the priority."""
        worth_s = abs(spec.priority) * self._ageing_s
        bounded_s = worth_s / (1.0 + worth_s / MOST_ADVANTAGE_S)
        return (spec.arrival_s + (bounded_s if spec.priority > 0 else -bounded_s), number)

    def yielding(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        """Those of less priority that also come later in the order, last first: age protects what runs, but preempts nothing."""
        candidates = []
        for request in reversed(running):
            if request.order < waiting.order:
                break
            if request.spec.priority > waiting.spec.priority:
                candidates.append(request)
        return candidates


class _Tenant:
    """`counter`: tokens of service over the tenant's weight, in virtual time."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.line = Line()
        self.num_unfinished = 0


_counter = attrgetter("counter")


class Fair:
    """Tokens are shared among tenants in proportion to their weights; within a tenant, by order of arrival.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the tenant that has had least is
    next, and one that comes back from a pause is lifted to the least of those that wait, so that a pause earns nothing. A computed token
    counts 1 and a sampled one 1 more, so that a generated token comes to 2 and a prompt token to 1, as in the paper; what the prefix
    cache has, and what is computed again after a preemption, counts nothing.

    The counter only says who is next. For a tenant that comes while others hold all slots or memory that would be too late, so besides
    each unfinished tenant is entitled to a share of both in proportion to its weight. Within its share it makes those above theirs give
    way, though never to below it: hence two never evict each other in turn.

    Takes time linear in the number of tenants, which the server's API keys bound.
    """

    def __init__(self, weights: Mapping[str, float], size: Size) -> None:
        self._weights = weights
        self._size = size
        self._tenants: dict[str, _Tenant] = {}
        self._queued: dict[str, _Tenant] = {}
        """Tenants with waiting requests; the last to come first among equals."""
        self._num_waiting = 0
        self._active_weight = 0.0
        """Sum of the weights of tenants with unfinished requests."""
        self._last = 0.0
        """Counter of the tenant that last stopped waiting."""

    def order(self, spec: GenerateRequest, number: int) -> Order:
        """The number."""
        return (0.0, number)

    def arrive(self, request: Request) -> None:
        """Puts a request behind those of its tenant, which is lifted if it had none waiting."""
        name = request.spec.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        tenant.num_unfinished += 1
        if tenant.num_unfinished == 1:
            self._weigh()
        if not len(tenant.line):
            least = min((other.counter for other in self._queued.values()), default=self._last)
            tenant.counter = max(tenant.counter, least)
        self._add(name, tenant, request)

    def put_back(self, request: Request) -> None:
        """Puts a request back to its place among those of its tenant."""
        self._add(request.spec.tenant, self._tenants[request.spec.tenant], request)

    def _add(self, name: str, tenant: _Tenant, request: Request) -> None:
        tenant.line.add(request)
        self._queued[name] = tenant
        self._num_waiting += 1

    def take(self, request: Request) -> None:
        """Takes a request out of its tenant's line."""
        tenant = self._tenants[request.spec.tenant]
        tenant.line.remove(request)
        self._num_waiting -= 1
        if not len(tenant.line):
            del self._queued[request.spec.tenant]
            self._last = tenant.counter

    def leave(self, request: Request) -> None:
        """A tenant without unfinished requests is entitled to nothing."""
        tenant = self._tenants[request.spec.tenant]
        tenant.num_unfinished -= 1
        if not tenant.num_unfinished:
            self._weigh()

    def _weigh(self) -> None:
        self._active_weight = sum(tenant.weight for tenant in self._tenants.values() if tenant.num_unfinished)

    def peek(self, held: Held) -> Request | None:
        """The first one of the tenant that had least and has one that is not held."""
        # Of equals the one that began to wait last: it may just have been lifted, while the others were served.
        for tenant in sorted(reversed(self._queued.values()), key=_counter):  # noqa: C414 - equals stay as they are
            request = tenant.line.peek(held)
            if request is not None:
                return request
        return None

    def ranked(self, partial: Iterable[Request]) -> list[Request]:
        """Those of the tenant that had least first."""
        return sorted(partial, key=lambda request: (self._tenants[request.spec.tenant].counter, request.order))

    def is_ahead(self, other: Request, waiting: Request) -> bool:
        """Only one of the same tenant: what a tenant has in the works does not keep others waiting."""
        return other.spec.tenant == waiting.spec.tenant

    def yielding(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        """The latest ones of tenants above their share, unless the waiting one's tenant would come to be above its own."""
        name = waiting.spec.tenant
        own = sum(self._size(request) for request in running if request.spec.tenant == name)
        if own > 0.0 and own + self._size(waiting) > self._entitled(name):
            return []
        return self._surplus(running, besides=name)

    def victim(self, running: Sequence[Request]) -> Request:
        """The latest one of a tenant above its share; if there is none, the last in order."""
        surplus = self._surplus(running)
        return surplus[0] if surplus else running[-1]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Advances the tenant's counter."""
        tenant = self._tenants[request.spec.tenant]
        tenant.counter += num_tokens / tenant.weight

    def num_held(self, partial: Sequence[Request], limit: int) -> int:
        """The long ones of tenants that have reached the limit."""
        count = Counter(request.spec.tenant for request in partial)
        return sum(tenant.line.num_long for name, tenant in self._queued.items() if count[name] >= limit)

    def _entitled(self, name: str) -> float:
        return self._tenants[name].weight / self._active_weight

    def _surplus(self, running: Sequence[Request], besides: str | None = None) -> list[Request]:
        """What tenants hold above their share, latest first; never all of a tenant."""
        shares: dict[str, float] = {}
        for request in running:
            name = request.spec.tenant
            shares[name] = shares.get(name, 0.0) + self._size(request)
        settled = {besides}
        entitled = {name: self._entitled(name) for name in shares}
        surplus = []
        for request in reversed(running):
            name = request.spec.tenant
            if name in settled:
                continue
            left = shares[name] - self._size(request)
            if left >= entitled[name]:
                shares[name] = left
                surplus.append(request)
            else:
                settled.add(name)
        return surplus

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(tenant.line for tenant in self._queued.values())
