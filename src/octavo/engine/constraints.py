"""The grammar side of the loop: requests that wait for their matcher, rows of a step that need a mask, matchers that follow tokens.

A request with a grammar reaches the scheduler only once its matcher is there, so that no step waits for one. A preempted request keeps
its matcher: it belongs to the request, not to a slot. This module does not know what a grammar is.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.contracts import EngineOutput, GenerateRequest, Grammar, RequestId, Slot, StepMasks, StepPlan
from octavo.engine.scheduler import Scheduler
from octavo.errors import InvalidRequestError, UnsupportedFieldError

POLL_S = 0.002
"""How long an engine without other work waits before it looks for finished matchers again."""
SETTLE_S = 0.5
"""An engine that had nothing to do for so long gets its grammars ready, so that the first one does not hold up others."""


class Constraints:
    """Of one loop. Without a `grammar` requests that have one are refused."""

    def __init__(self, scheduler: Scheduler, grammar: Grammar | None) -> None:
        self._scheduler = scheduler
        self._grammar = grammar
        self._held: dict[RequestId, GenerateRequest] = {}
        """Not yet the scheduler's."""
        self._open: set[RequestId] = set()
        """Have a matcher, held or scheduled."""
        self._bound: dict[Slot, RequestId] = {}
        self._prepared = grammar is None

    @property
    def holds_requests(self) -> bool:
        """Whether requests wait for their matchers."""
        return bool(self._held)

    @property
    def idle_timeout_s(self) -> float | None:
        """How long an engine without work may wait for messages; then `settle` is to be called."""
        if self._held:
            return POLL_S
        return None if self._prepared else SETTLE_S

    def settle(self) -> None:
        """The engine has nothing to do."""
        if not self._held and not self._prepared and self._grammar is not None:
            self._prepared = True
            self._grammar.prepare()

    def add(self, request: GenerateRequest) -> None:
        """Takes in a request, which reaches the scheduler now or when its matcher is there."""
        if request.grammar is None:
            self._scheduler.add(request)
        elif self._grammar is None:
            error = UnsupportedFieldError("this engine has no structured output", param="structured_outputs")
            self._scheduler.add(request, error)
        else:
            self._held[request.request_id] = request
            self._open.add(request.request_id)
            self._grammar.open(request.request_id, request.grammar)

    def admit(self) -> None:
        """Hands over the requests whose matchers are there, and refuses those for which there is none."""
        if not self._held or self._grammar is None:
            return
        for request_id, problem in self._grammar.opened():
            request = self._held.pop(request_id, None)
            if request is None:
                continue
            if problem is None:
                self._scheduler.add(request)
            else:
                self._scheduler.add(request, InvalidRequestError(problem, param="structured_outputs"))

    def release(self, request_ids: Iterable[RequestId] | None = None) -> None:
        """Hands over requests (None: all) as they are, because they are about to be ended."""
        for request_id in list(self._held) if request_ids is None else request_ids:
            if (request := self._held.pop(request_id, None)) is not None:
                self._scheduler.add(request)

    def masks(self, plan: StepPlan) -> StepMasks | None:
        """Begins the masks of a submitted plan. None when no row needs one."""
        for start in plan.starts:
            if start.request_id in self._open:
                self._bound[start.slot] = start.request_id
            else:
                self._bound.pop(start.slot, None)
        if self._grammar is None or not self._bound:
            return None
        rows = [
            (row.slot, self._bound[row.slot])
            for row in plan.rows
            if row.sample and self._bound.get(row.slot) in self._open
        ]
        return self._grammar.masks(rows) if rows else None

    def follow(self, output: EngineOutput) -> None:
        """Moves matchers on by what was sampled, and forgets those of finished requests."""
        if not self._open or self._grammar is None:
            return
        for event in output.events:
            if event.request_id not in self._open:
                continue
            if event.finish_reason is None:
                self._grammar.advance(event.request_id, event.token_ids)
            else:
                self._open.remove(event.request_id)
                self._grammar.close(event.request_id)
