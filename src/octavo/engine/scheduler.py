"""Decides every step: which requests run, how many of their tokens are computed, which blocks they get, and how they end.

One rule covers prefill, chunked prefill, decode, prefix hits and recomputation after preemption: compute some of the
known-but-not-computed tokens within the step's budget.

- Every running request advances in every step: one token each, which the budget always holds as it is never below the number of slots.
  What is left is shared by prompts. Short ones that wait come before the greater part of a long one, so they get in beside it
  however many tokens that has; and while anybody decodes long ones get a bounded part of the step.
- A waiting request is admitted when the pools can take all its known tokens beside what the running ones are still to take: the rest of
  their prompts, and one block each to grow into. Else it would soon be preempted and computed again. It takes blocks only as its chunks are
  computed. One that finds no room is waited for; nobody passes it. With nothing running any accepted request fits, so the queue
  always moves.
- A waiting request whose next block a running one is computing is parked until that block can be shared. Those behind it may start
  meanwhile, but a slot stays reserved for it. Parked requests hold nothing, and what they wait for runs: no deadlock.
- When a running request finds no block, one is preempted: it loses slot and blocks, keeps its tokens, and waits where it stood before.
  Its published blocks stay findable, so little is recomputed unless memory is really short. A policy may also preempt to make room for
  one that waits, and only if that is enough for it. The first in the policy's order is never preempted for want of blocks, which is why
  everything finishes.

Where short prompts start beside many tokens of others, the step is computed in parts, the prompts first: their first tokens need not wait
for the others, who get theirs when they would anyway. For a while after short prompts started, many that decode are computed in parts
too: prompts that come between two parts may join the step, within the same bounds, and so wait for a part of it only.

`plan` decides and `commit` (or `fail`) applies. One plan is in flight at a time, a part of a step counting as one; in between `add`,
`cancel`, `reset_prefix_cache` and `flush` may be called. The clock is read for the statistics and for deadlines; no other decision
depends on it. This module does not know tensors, text, or where messages come from.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from octavo.config import SchedulerConfig
from octavo.contracts import (
    DiskSpace,
    EngineOutput,
    FinishReason,
    ForwardWork,
    GenerateRequest,
    KVLayout,
    RequestId,
    Retention,
    RowPlan,
    RowResult,
    Slot,
    SlotStart,
    StepPlan,
    StepResult,
    TokenEvent,
)
from octavo.engine.blocks import require
from octavo.engine.deadlines import Deadlines, Phase
from octavo.engine.draft import Draft
from octavo.engine.kv import Hit, KVManager, capacity_tokens, unpinned
from octavo.engine.parking import Parking
from octavo.engine.request import Request, Status
from octavo.engine.settings import make_policy, prefill_bounds, token_budget
from octavo.engine.tally import Tally
from octavo.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OctavoError,
)

DEFAULT_LEAST_PART = 16
"""For executors that do not tell theirs."""

LATELY = 100
"""Steps after the start of a short prompt in which more are expected: those that decode are computed in parts, so that they get in."""


class Scheduler:
    """Owns all requests and block tables. Not thread-safe: one thread calls it.

    `max_model_len` in tokens. `namespace` stands for all that decides the bits of KV content besides tokens (weights,
    arithmetic, KV format) and starts every key of the prefix cache. `least_part` is the executor's, as `BackendModel` has it. `clock`
    gives seconds for statistics and deadlines, on the clock of `GenerateRequest.arrival_s`.

    Raises ConfigError when the settings contradict each other.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        max_pinned_tokens: int = 0,
        swap_bytes: int = 0,
        disk: DiskSpace | None = None,
        least_part: int | None = DEFAULT_LEAST_PART,
        namespace: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = token_budget(config, max_model_len)
        self._chunked = config.enable_chunked_prefill
        self._bounds = prefill_bounds(config, self._budget)
        self._num_slots = config.max_num_seqs
        self._num_steps = config.num_scheduler_steps or 1
        # Who wants several steps in one go does not want one in several.
        self._least_rest = math.inf if least_part is None or self._num_steps > 1 else least_part
        self._max_model_len = max_model_len
        self._capacity = capacity_tokens(unpinned(layout, max_pinned_tokens), self._budget)
        self._kv = KVManager(
            layout,
            namespace=namespace,
            enable_prefix_caching=enable_prefix_caching,
            max_num_batched_tokens=self._budget,
            max_pinned_tokens=max_pinned_tokens,
            swap_bytes=swap_bytes,
            disk=disk,
        )
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        """All that are not finished."""
        self._num_added = 0
        self._policy = make_policy(config, self._size)
        """Holds those that wait."""
        self._parking = Parking()
        """Those that wait outside of the policy's queue, because a running one computes what they need."""
        self._pool_tokens = min(
            (
                count * layout.block_size
                for group, count in zip(layout.groups, layout.num_blocks, strict=True)
                if group.retention is Retention.FULL
            ),
            default=None,
        )
        self._deadlines = Deadlines(config)
        self._running: list[Request] = []
        """In the policy's order."""
        self._partial: list[Request] = []
        """Those of the last plan that it does not compute to the end."""
        self._in_flight: list[Request] = []
        """Those of the plan in flight, row by row; some may have been cancelled meanwhile."""
        self._rest: dict[Request, RowPlan] = {}
        """What is decided of the step and neither computed nor in flight; some may have been cancelled."""
        self._draft: Draft | None = None
        """The step whose rest that is."""
        self._num_late = 0
        """`Draft.num_late` of the last step."""
        self._free_slots = [Slot(slot) for slot in reversed(range(config.max_num_seqs))]
        self._releases: list[Slot] = []
        """Slots the executor is still to be told about; they may be given out again in the same plan."""
        self._step = 0
        self._short_step = -LATELY
        """When a short prompt last started."""
        self._tally = Tally()
        self._reported: tuple[int, int, float] = (0, 0, 0.0)

    # --- the world outside ------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or part of a step is; then `plan` returns a plan, unless all are over a deadline."""
        return bool(self._requests or self._rest)

    @property
    def has_events(self) -> bool:
        """Whether events wait for the next output."""
        return bool(self._tally.events)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, preempted ones included."""
        return len(self._policy) + len(self._parking)

    @property
    def kv_usage(self) -> float:
        """Used share (0..1) of the fullest pool."""
        return self._kv.usage

    @property
    def max_request_tokens(self) -> int:
        """Most tokens, prompt and output together, that a request can come to."""
        return self._max_model_len if self._capacity is None else min(self._max_model_len, self._capacity)

    def add(self, spec: GenerateRequest, error: OctavoError | None = None) -> None:
        """Takes in a request. One that can never run, or not because of `error`, gets its terminal ERROR event with the next output."""
        require(spec.request_id not in self._requests, f"two requests have the id {spec.request_id}")
        self._num_added += 1
        order = self._policy.order(spec, self._num_added)
        request = Request(spec, self._kv.sequence(spec.namespace), self._max_model_len, order)
        self._requests[spec.request_id] = request
        refusal = error or self._refusal(request)
        if refusal is not None:
            self._end(request, _error_event(request, refusal), arrived=False)
            return
        request.is_long = self._is_long(request)
        self._policy.arrive(request)
        self._deadlines.begin(request, Phase.WAITING, spec.arrival_s)

    def cancel(self, request_ids: Iterable[RequestId]) -> None:
        """Ends requests in whatever state with an ABORT event. Ids that are unknown or finished are ignored.

        If a step that computes a request is in flight, its blocks and slot are freed only by that step's commit, and its result is dropped.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._withdraw(request)
            self._end(request, request.event(finish_reason=FinishReason.ABORT))

    def _withdraw(self, request: Request) -> None:
        """Takes a request out of where it runs or waits."""
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif not self._parking.remove(request):
            self._policy.take(request)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks that no request holds."""
        self._kv.reset_prefix_cache()

    def unpin(self, token_ids: Sequence[int] | None, namespace: bytes) -> None:
        """Stops keeping the cached blocks of a prompt, of all prompts with None."""
        if token_ids is None:
            self._kv.unpin_all()
        else:
            self._kv.unpin(namespace, token_ids)

    def flush(self) -> EngineOutput | None:
        """An output outside of steps: waiting events, or a changed state. None when there is nothing to tell."""
        if not self._tally.events and self._state() == self._reported:
            return None
        return self._output()

    def abort_all(self) -> None:
        """Cancels everything."""
        self.cancel(list(self._requests))
        for request in self._dropped_rest():
            self._release(request)

    def farewell(self) -> StepPlan | None:
        """A last step without rows, which puts on disk what is cached and not there yet. None when there is nothing to do."""
        require(not self._in_flight and not self._rest, "a plan was asked for while one is in flight")
        self._kv.save_all()
        traffic = self._kv.take_traffic()
        if traffic is None:
            return None
        self._step += 1
        traffic = msgspec.structs.replace(traffic, patient=True)
        return StepPlan(step=self._step, releases=(), starts=(), rows=(), num_tokens=0, traffic=traffic)

    def kill_all(self, error: EngineDeadError) -> None:
        """Gives every unfinished request its terminal ERROR event and leaves all else as it is: the scheduler cannot be used any more."""
        now_s = self._clock()
        for request in self._requests.values():
            self._tally.events.append(_error_event(request, error))
            self._tally.finished.append(request.times(FinishReason.ERROR, now_s, error.code))
        self._requests.clear()

    def _refusal(self, request: Request) -> OctavoError | None:
        num_prompt_tokens, room = request.num_prompt_tokens, self._max_model_len
        if num_prompt_tokens == 0:
            return InvalidRequestError("the prompt has no tokens; send at least one", param="prompt")
        if num_prompt_tokens + min(1, request.spec.sampling.max_tokens) > room:
            return ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for output within the model's {room}; shorten it",
                param="prompt",
            )
        if self._capacity is not None and request.max_known > self._capacity:
            return ContextLengthError(
                f"prompt and max_tokens come to {request.max_known} tokens, but the KV cache holds {self._capacity}; "
                "shorten the prompt, lower max_tokens, or start the server with more KV cache memory",
                param="max_tokens",
            )
        return None

    # --- plan -------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decides the next step, or goes on with one that is computed in parts. None when there is nothing to compute."""
        require(not self._in_flight, "a plan was asked for while one is in flight")
        now_s = self._clock()
        draft = self._draft
        if draft is None:
            self._expire(now_s)
            if not self._requests:
                return None
            draft = self._begin(now_s)
            decided: Iterable[Request] = draft.work
        else:
            # Who has come meanwhile gets in as if the step began now, as far as it has room.
            self._admit(draft, now_s)
            decided = draft.untold
        for request in decided:
            self._rest[request] = self._row(request, draft.work[request])
            request.in_flight = True
        self._partial = draft.partial
        return self._next_part(draft)

    def _begin(self, now_s: float) -> Draft:
        """A new step: what running requests and those that wait compute in it."""
        partial = [request for request in self._running if len(request.token_ids) - request.num_computed > 1]
        draft = Draft(
            self._budget,
            self._bounds,
            len(self._running) - len(partial),
            least_rest=self._least_rest,
            divides=self._step < self._short_step + LATELY,
            num_carried=self._num_late,
        )
        self._advance_running(draft, partial)
        self._admit(draft, now_s)
        self._use_up(draft)
        draft.repeat = self._repeat(draft)
        require(len(draft.work) == len(self._running), "a running request is not in the step")
        require(bool(draft.work) or self._kv.offload.is_fetching_any, "requests are unfinished but none can run")
        self._step += 1
        return draft

    def _repeat(self, draft: Draft) -> int:
        """How often in a row all requests of a step may decode: as long as none can end by length and their blocks are there at once.

        Only where nothing is to be known of them between two tokens.
        """
        repeat = self._num_steps
        if repeat == 1 or not draft.work or draft.untold or draft.partial or draft.num_tokens != len(draft.work):
            return 1
        for request in draft.work:
            watched = request.spec.grammar is not None or request.spec.sampling.logprobs is not None
            if watched or request.first_token_s is None:
                return 1
            repeat = min(repeat, request.max_known - request.num_known)
        wanted = [(request.blocks, request.num_computed + repeat) for request in draft.work]
        if repeat <= 1 or not self._kv.has_room(wanted):
            return 1
        for blocks, num_tokens in wanted:
            self._kv.allocate(blocks, num_tokens)
        return repeat

    def _next_part(self, draft: Draft) -> StepPlan:
        """Of what is decided and not computed what comes next, which is in flight from now on."""
        starts = tuple(draft.untold.values())
        draft.untold.clear()
        rows = {request: self._rest.pop(request) for request in draft.next_part(self._rest)}
        self._draft = draft if self._rest else None
        self._num_late = draft.num_late
        self._in_flight = list(rows)
        releases, self._releases = tuple(self._releases), []
        self._count(rows)
        return StepPlan(
            step=self._step,
            releases=releases,
            starts=starts,
            rows=tuple(rows.values()),
            num_tokens=sum(row.count for row in rows.values()),
            repeat=draft.repeat,
            copies=self._kv.take_copies(),
            traffic=self._kv.take_traffic(),
        )

    def _expire(self, now_s: float) -> None:
        """Ends requests that are over a deadline."""
        for request, error in self._deadlines.expired(now_s):
            self._withdraw(request)
            self._end(request, _error_event(request, error))

    def _advance_running(self, draft: Draft, partial: list[Request]) -> None:
        """Gives every running request its tokens. Where blocks are short, some are preempted."""
        extra = self._extra(draft, partial) if partial else {}
        for request in tuple(self._running):
            if request in draft.preempted:
                continue
            count = 1 + extra.get(request, 0)
            self._kv.slide(request.blocks, request.num_computed)
            while not self._give(draft, request, count):
                victim = self._policy.victim(self._running)
                self._preempt(victim, draft)
                if victim is request:
                    break

    def _extra(self, draft: Draft, partial: list[Request]) -> dict[Request, int]:
        """How many tokens, besides the one that each running request takes, partly computed ones take before those that wait."""
        left = self._budget - len(self._running)
        long = draft.assured(others_wait=len(self._policy) > 0)
        extra = {}
        for request in self._policy.ranked(partial):
            if request.num_known - request.num_computed > self._kv.block_size:
                request.num_computed = self._kv.pick_up(request.blocks, request.token_ids, request.max_hit_tokens)
            count = min(request.num_known - request.num_computed - 1, left)
            if request.is_long:
                count = max(0, min(count, long - 1))
                long -= count + 1
            extra[request] = count
            left -= count
        return extra

    def _give(self, draft: Draft, request: Request, count: int) -> bool:
        """Has a running request compute `count` tokens more than the draft says. False, with nothing changed, if blocks are short."""
        end = request.num_computed + draft.work.get(request, 0) + count
        if end > request.blocks.num_tokens and self._kv.allocate(request.blocks, end) is None:
            return False
        draft.give(request, count)
        self._charge(request, end, num_sampled=int(end == len(request.token_ids)))
        return True

    def _charge(self, request: Request, end: int, num_sampled: int) -> None:
        """Counts as service what is computed before a position, and sampled; what is computed again is none."""
        if end > request.num_charged:
            self._policy.charge(request, end - request.num_charged + num_sampled)
            request.num_charged = end

    def _row(self, request: Request, count: int) -> RowPlan:
        end = request.num_computed + count
        kept_blocks, new_blocks = self._kv.tell(request.blocks)
        forced = tuple(request.token_ids[-request.num_untold :]) if request.num_untold else ()
        request.num_untold = 0
        assert request.slot is not None
        return RowPlan(
            slot=request.slot,
            start=request.num_computed,
            count=count,
            new_blocks=new_blocks,
            kept_blocks=kept_blocks,
            freed_blocks=self._kv.freed(request.blocks),
            forced=forced,
            sample=end == len(request.token_ids) and not request.at_length_limit,
        )

    def _count(self, rows: dict[Request, RowPlan]) -> None:
        """Notes what a step is made of."""
        num_tokens = num_decode_rows = 0
        for request, row in rows.items():
            num_tokens += row.count
            if row.count == 1 and len(request.token_ids) > request.num_prompt_tokens:
                num_decode_rows += 1
        self._tally.num_decode_rows += num_decode_rows
        self._tally.num_prefill_rows += len(rows) - num_decode_rows
        self._tally.num_prefill_tokens += num_tokens - num_decode_rows

    def _admit(self, draft: Draft, now_s: float) -> None:
        """Starts waiting requests in the policy's order while budget, slots and blocks last."""
        for ready in self._parking.take_ready():
            self._policy.put_back(ready)
        if not len(self._policy):
            return
        reserve = self._reserve(draft)

        def held(request: Request) -> bool:
            """Whether a long prompt that this step cannot hold whole must wait for others like it."""
            ahead = sum(self._policy.is_ahead(other, request) for other in draft.partial)
            return (
                ahead >= self._bounds.most and request.num_known - self._hit(request).num_tokens > draft.left_for_long
            )

        while draft.left > 0 and (request := self._policy.peek(held)) is not None and request not in draft.preempted:
            hit = self._hit(request)
            remaining = request.num_known - hit.num_tokens
            if request.is_long != (remaining > self._bounds.long):
                self._policy.take(request)
                request.is_long = not request.is_long
                self._policy.put_back(request)
                continue
            awaited = self._kv.awaited(request.blocks, request.token_ids, hit, request.max_hit_tokens)
            if awaited is not None and self._has_slot(request):
                self._policy.take(request)
                self._parking.add(request, awaited)
                self._kv.counts.waits += 1
                continue
            if remaining > draft.left and not self._chunked:
                break
            if not request.is_long and not draft.has_room_to_start(remaining):
                break
            if not self._has_slot(request) or not self._kv.fits(
                request.blocks, hit.num_blocks, request.num_known, reserve
            ):
                victims = self._giving_way(request, hit, reserve, draft)
                if not victims:
                    break
                for victim in victims:
                    self._preempt(victim, draft)
                    self._tally.num_displaced += 1
                reserve = self._reserve(draft)
            count = min(remaining, draft.left)
            if request.is_long and remaining > draft.left_for_long:
                # It is to be split, so those behind it come first; what they leave it gets in the end.
                count = max(1, min(draft.left_for_long, draft.assured(others_wait=len(self._policy) > 1)))
            self._start(request, hit, now_s)
            require(self._give(draft, request, count), "blocks were counted but are not there")
            draft.start(request, self._slot_start(request))
            if not request.is_long and request.first_token_s is None:
                self._short_step = self._step
            growth = self._kv.growth(request.blocks, request.num_known)
            reserve = [kept + more for kept, more in zip(reserve, growth, strict=True)]

    def _has_slot(self, request: Request) -> bool:
        """Whether a slot is free that is not reserved for a parked request."""
        free = len(self._free_slots)
        if free > len(self._parking):
            return True
        return free > sum(self._policy.is_ahead(other, request) for other in self._parking)

    def _hit(self, request: Request) -> Hit:
        """What the prefix cache has of a waiting request."""
        return self._kv.find(request.blocks, request.token_ids, request.max_hit_tokens)

    def _is_long(self, request: Request) -> bool:
        if request.num_known <= self._bounds.long:
            return False
        return request.num_known - self._hit(request).num_tokens > self._bounds.long

    def _reserve(self, draft: Draft) -> list[int]:
        """Per group, blocks that the running requests are still to take: the rest of what they know, and one each to go on."""
        reserve = [len(self._running) - len(draft.partial)] * len(self._kv.pools)
        for request in draft.partial:
            growth = self._kv.growth(request.blocks, request.num_known)
            reserve = [kept + more for kept, more in zip(reserve, growth, strict=True)]
        return reserve

    def _size(self, request: Request) -> float:
        """The share of slots or of blocks, whichever is larger, that a running request holds or a waiting one would."""
        share = 1 / self._num_slots
        if self._pool_tokens is None:
            return share
        num_tokens = request.blocks.num_tokens if request.status is Status.RUNNING else request.num_known
        return max(share, num_tokens / self._pool_tokens)

    def _giving_way(self, request: Request, hit: Hit, reserve: list[int], draft: Draft) -> list[Request]:
        """The fewest running requests that make room for a waiting one by giving way, as the policy has it. None if all are not enough.

        Nobody does between the parts of a step: some that run are computed already and others still to be, whatever their order.
        """
        if self._draft is not None:
            return []
        candidates = [other for other in self._policy.yielding(request, self._running) if other not in draft.starts]
        if not candidates:
            return []

        def room(freed: list[int]) -> bool:
            kept = [count - more for count, more in zip(reserve, freed, strict=True)]
            return self._kv.fits(request.blocks, hit.num_blocks, request.num_known, kept)

        # Counting what becomes free takes time, so first whether it could be enough.
        most = -(-sum(other.blocks.num_tokens for other in candidates) // self._kv.block_size) + sum(reserve)
        if not room([most] * len(reserve)):
            return []
        besides = self._kv.hit_blocks(request.blocks, hit.num_blocks)
        freed = [0] * len(reserve)
        for number, other in enumerate(candidates, start=1):
            growth = self._kv.growth(other.blocks, other.num_known)
            released = self._kv.releasable(other.blocks, besides)
            freed = [sum(counts) for counts in zip(freed, growth, released, strict=True)]
            if room(freed):
                return candidates[:number]
        return []

    def _start(self, request: Request, hit: Hit, now_s: float) -> None:
        """A waiting request takes a slot and what the prefix cache has of it."""
        self._policy.take(request)
        insort(self._running, request, key=lambda running: running.order)
        request.move(Status.RUNNING)
        request.slot = self._free_slots.pop()
        request.num_untold = 0
        request.num_computed = hit.num_tokens
        request.num_charged = max(request.num_charged, hit.num_tokens)
        self._kv.take(request.blocks, hit)
        self._kv.claim(request.blocks, request.token_ids)
        if request.scheduled_s is None:
            request.scheduled_s = now_s
            self._deadlines.begin(request, Phase.PREFILL, now_s)
            request.num_cached_tokens = hit.num_tokens
            if self._kv.caching and request.prompt_logprobs is None:
                self._tally.prefix_cache_queries += request.num_prompt_tokens
                self._tally.prefix_cache_hits += hit.num_tokens
                self._kv.count_hit(hit)

    def _slot_start(self, request: Request) -> SlotStart:
        assert request.slot is not None
        return SlotStart(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.spec.sampling,
        )

    def _use_up(self, draft: Draft) -> None:
        """Gives what the step has left to prompts that are partly computed."""
        if not draft.partial or draft.left == 0:
            return
        for request in self._policy.ranked(draft.partial):
            left = draft.left_for_long if request.is_long else draft.left
            more = min(left, request.num_known - request.num_computed - draft.work[request])
            if more > 0:
                self._give(draft, request, more)

    def _preempt(self, request: Request, draft: Draft) -> None:
        """Takes slot and blocks from a running request, which waits again."""
        self._running.remove(request)
        draft.drop(request)
        request.move(Status.PREEMPTED)
        request.num_preemptions += 1
        request.num_computed = 0
        self._release(request, resumes=True)
        request.is_long = self._is_long(request)
        self._policy.put_back(request)
        self._tally.num_preemptions += 1

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, step_s: float = 0.0) -> EngineOutput:
        """Applies a finished step, whose result passed `verify`: publishes full blocks, adds tokens, ends requests.

        A row that sampled may have more tokens than it passed with, those forced after it. `step_s` is how long the step took.
        """
        now_s = self._clock()
        num_steps = max((len(row.token_ids) for row in result.rows), default=1) if plan.repeat > 1 else 1
        self._kv.landed(result.traffic, plan.num_tokens * num_steps, step_s)
        for row, outcome, request in zip(plan.rows, result.rows, self._landed(), strict=True):
            if outcome.error is None:
                request.num_computed = row.start + row.count
                self._kv.publish(request.blocks, request.token_ids, request.num_computed)
            if request.status is Status.FINISHED:
                self._release(request)
            elif outcome.error is not None:
                blame = InvalidRequestError if outcome.invalid_request else EngineError
                self._end(request, _error_event(request, blame(outcome.error)))
            else:
                self._advance(request, row, outcome, now_s, repeated=plan.repeat > 1)
        self._running = [request for request in self._running if request.status is Status.RUNNING]
        return self._output(step_s, result.work)

    def verify(self, plan: StepPlan, result: StepResult) -> None:
        """Raises EngineError when a result does not answer the plan in flight: the executor's fault, so the step is to `fail`."""
        if result.step != plan.step or len(result.rows) != len(plan.rows):
            raise EngineError(f"step {plan.step} was answered by {len(result.rows)} rows of step {result.step}")
        for row, outcome, request in zip(plan.rows, result.rows, self._in_flight, strict=True):
            if outcome.slot != row.slot:
                raise EngineError(f"step {plan.step}: the row of slot {row.slot} was answered for slot {outcome.slot}")
            if outcome.error is not None:
                continue
            if not row.sample <= len(outcome.token_ids) <= row.sample * plan.repeat:
                raise EngineError(
                    f"step {plan.step}, slot {row.slot}: got {len(outcome.token_ids)} tokens, expected {int(row.sample)}"
                    f"{f' to {plan.repeat}' if plan.repeat > 1 else ''}"
                )
            if request.prompt_logprobs is not None:
                expected = max(0, min(row.start + row.count, request.num_prompt_tokens - 1) - row.start)
                if len(outcome.prompt_logprobs or ()) != expected:
                    raise EngineError(f"step {plan.step}, slot {row.slot}: expected {expected} prompt logprobs")

    def fail(self, plan: StepPlan, error: OctavoError) -> EngineOutput:
        """Ends the requests of a step that raised, and only those. Nothing they computed in it counts.

        Nobody knows how much of the plan the executor applied, so the next plan releases its slots and repeats its releases; and what was
        to be computed after it relies on it, so that ends too.
        """
        self._kv.offload.failed(plan.traffic)
        for request in (*self._landed(), *self._dropped_rest()):
            if request.status is Status.FINISHED:
                self._release(request)
            else:
                self._end(request, _error_event(request, error))
        self._running = [request for request in self._running if request.status is Status.RUNNING]
        self._releases.extend(slot for slot in plan.releases if slot not in self._releases)
        return self._output()

    def _landed(self) -> Iterator[Request]:
        """The requests of the plan in flight, which is so no longer."""
        landed, self._in_flight = self._in_flight, []
        for request in landed:
            request.in_flight = False
            yield request

    def _dropped_rest(self) -> Iterator[Request]:
        """The requests of the rest of the step, which will not be computed."""
        dropped, self._rest, self._draft = self._rest, {}, None
        for request in dropped:
            request.in_flight = False
            yield request

    def _advance(self, request: Request, row: RowPlan, outcome: RowResult, now_s: float, *, repeated: bool) -> None:
        if outcome.prompt_logprobs is not None:
            request.collect_prompt_logprobs(row.start, outcome.prompt_logprobs)
        if row.sample:
            known = request.num_known
            for token in outcome.token_ids:
                reason, stop_token = request.append(token)
                if reason is not None:
                    break
            count = request.num_known - known
            if repeated:
                # All but the last were computed too.
                request.num_computed += count - 1
                self._kv.publish(request.blocks, request.token_ids, request.num_computed)
                self._charge(request, request.num_computed, num_sampled=count - 1)
            else:
                request.num_untold = count - 1
            self._tally.num_generated_tokens += count
            is_first = request.first_token_s is None
            if is_first:
                if request.spec.pin:
                    request.num_pinned_tokens = self._kv.pin(request.blocks, request.num_prompt_tokens)
                request.first_token_s = now_s
                self._deadlines.begin(request, Phase.DECODE, now_s)
                self._tally.ttft_s.append(now_s - request.spec.arrival_s)
                self._tally.num_prompt_tokens += request.num_prompt_tokens
            else:
                self._tally.itl_s.append(now_s - request.last_token_s)
                if repeated:
                    self._tally.itl_s += [0.0] * (count - 1)  # they come with the first
            request.last_token_s = now_s
            event = request.event(outcome.token_ids[:count], outcome.logprobs, reason, stop_token)
            if reason is not None:
                self._end(request, event)
            else:
                (self._tally.firsts if is_first else self._tally.events).append(event)
        elif request.num_computed == request.num_known:
            # Nothing was to be generated: the prompt was computed for its own sake.
            self._tally.num_prompt_tokens += request.num_prompt_tokens
            self._end(request, request.event(finish_reason=FinishReason.LENGTH))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, event: TokenEvent, *, arrived: bool = True) -> None:
        """The one way a request ends: its terminal event goes out, and what it holds is freed as soon as no step uses it.

        The policy never heard of one that has not `arrived`.
        """
        assert event.finish_reason is not None
        del self._requests[request.request_id]
        request.move(Status.FINISHED)
        self._deadlines.end(request)
        if arrived:
            self._policy.leave(request)
        self._tally.events.append(event)
        self._tally.finished.append(request.times(event.finish_reason, self._clock(), event.error_code))
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request, *, resumes: bool = False) -> None:
        self._kv.free(request.blocks, request.token_ids, resumes=resumes)
        if request.slot is not None:
            self._free_slots.append(request.slot)
            self._releases.append(request.slot)
            request.slot = None

    def _state(self) -> tuple[int, int, float]:
        return len(self._running), self.num_waiting, self._kv.usage

    def _output(self, step_s: float = 0.0, work: ForwardWork | None = None) -> EngineOutput:
        self._reported = num_running, num_waiting, kv_usage = self._state()
        return self._tally.take(
            step=self._step,
            num_running=num_running,
            num_waiting=num_waiting,
            num_deferred=len(self._parking) + self._policy.num_held(self._partial, self._bounds.most),
            kv_usage=kv_usage,
            cache=self._kv.take_stats(),
            step_s=step_s,
            work=work,
        )

    # --- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises InvariantError unless requests, slots, tables and pools agree. Changes nothing. O(blocks and requests): for tests.

        May be called at any time, also while a plan is in flight.
        """
        in_step = (*self._in_flight, *self._rest)
        require(len(in_step) == len(set(in_step)), "a request is twice in a step")
        require(all(request.in_flight for request in in_step), "a request of the step is not marked as in flight")
        cancelled = [request for request in in_step if request.status is Status.FINISHED]
        holders = self._running + cancelled
        for request in self._running:
            require(request.status is Status.RUNNING, f"{request.request_id} runs but is {request.status.name}")
        for request in (*self._policy, *self._parking):
            require(
                request.status in (Status.WAITING, Status.PREEMPTED),
                f"{request.request_id} waits but is {request.status.name}",
            )
            require(request.slot is None, f"{request.request_id} waits but has a slot")
            require(
                request.blocks.num_tokens == 0 and request.num_computed == 0,
                f"{request.request_id} waits but holds blocks",
            )
        known = {request.request_id for request in (*self._running, *self._policy, *self._parking)}
        require(known == set(self._requests), "a request is lost: neither running nor waiting")
        require(
            len(known) == len(self._running) + self.num_waiting,
            "a request is both running and waiting, or twice in one",
        )
        slots = [request.slot for request in holders] + self._free_slots
        require(len(slots) == self._num_slots == len(set(slots)), "a slot is lost or has two owners")
        require(None not in slots, "a running request has no slot")
        require(len(self._releases) == len(set(self._releases)), "a slot is released twice")
        require(set(self._releases) <= set(self._free_slots), "a slot in use is to be released")
        orders = [request.order for request in self._running]
        require(orders == sorted(orders), "running requests are not in order")
        for request in holders:
            room, computed = request.blocks.num_tokens, request.num_computed
            require(computed <= room, f"{request.request_id}: {computed} tokens computed, room for {room}")
            require(computed < request.num_known, f"{request.request_id} runs but has nothing to compute")
            full = computed // self._kv.block_size if request.blocks.chain is not None else 0
            published = request.blocks.num_published
            # What is loaded in the step in flight is published after it.
            require(
                published == full or (request.in_flight and published < full),
                f"{request.request_id}: published blocks are not the computed ones",
            )
        self._kv.check(request.blocks for request in holders)

    def check_idle(self) -> None:
        """Raises InvariantError if blocks or slots are held although no request is unfinished. O(groups)."""
        if not self._requests and not self._in_flight and not self._rest:
            held = [pool.num_blocks - pool.num_free for pool in self._kv.pools]
            require(held == self._kv.pins.num_blocks, "idle, but blocks are still held")
            require(len(self._free_slots) == self._num_slots, "idle, but slots are still held")


def _error_event(request: Request, error: OctavoError) -> TokenEvent:
    return request.event(finish_reason=FinishReason.ERROR, error_code=error.code, error_message=error.message)
