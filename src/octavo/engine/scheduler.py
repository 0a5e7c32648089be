"""Decides every step: which requests run, how many of their tokens are computed, which blocks they get, and how they end.

One rule covers prefill, chunked prefill, decode, prefix hits and recomputation after preemption: compute some of the
known-but-not-computed tokens within the step's budget.

- Running requests come first, in order of arrival, then waiting ones while budget is left. So only the last running one
  can be partly computed when a step is planned; those before it take one token each, and since the budget is never below
  the number of slots, every running request advances in every step, however long another's prompt is.
- A waiting request is admitted when the pools can take all its known tokens and leave one block for each running request
  to grow into: else it would soon be preempted and computed again. It takes blocks only as its chunks are computed. With
  nothing running any accepted request fits, so the queue always moves.
- A waiting request whose next block a running one is computing is parked until that block can be shared. Others may start
  meanwhile, but a slot stays reserved for it. Parked requests hold nothing, and what they wait for runs: no deadlock.
- When a running request finds no block, the last-arrived running one is preempted: it loses slot and blocks, keeps its
  tokens, and waits at the front of the queue. Its published blocks stay findable, so little is recomputed unless memory
  is really short. The first-arrived one is never preempted for another, which is why everything finishes.

`plan` decides and `commit` (or `fail`) applies. One plan is in flight at a time; in between `add`, `cancel`,
`reset_prefix_cache` and `flush` may be called. No decision depends on a clock. This module does not know tensors, text, or
where messages come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from octavo.config import SchedulerConfig
from octavo.contracts import (
    EngineOutput,
    FinishReason,
    ForwardWork,
    GenerateRequest,
    KVLayout,
    RequestId,
    RowPlan,
    RowResult,
    Slot,
    SlotStart,
    StepPlan,
    StepResult,
    TokenEvent,
)
from octavo.engine.blocks import require
from octavo.engine.kv import KVManager, capacity_tokens
from octavo.engine.parking import Parking
from octavo.engine.policy import FirstComeFirstServed, WaitingQueue
from octavo.engine.request import Request, Status
from octavo.engine.tally import Tally
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OctavoError,
)

DEFAULT_TOKEN_BUDGET = 512
"""Tokens per step: enough rows for efficient matrix products, few enough that a decode beside a prefill stays fluent."""


MAX_NUM_SEQS = 65_536
"""Every slot costs memory from the start."""


class Scheduler:
    """Owns all requests and block tables. Not thread-safe: one thread calls it.

    `max_model_len` in tokens. `namespace` stands for all that decides the bits of KV content besides tokens (weights,
    arithmetic, KV format) and starts every key of the prefix cache. `clock` gives seconds for the statistics, on the clock
    of `GenerateRequest.arrival_s`.

    Raises ConfigError when the settings contradict each other.
    """

    def __init__(
        self,
        layout: KVLayout,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        namespace: bytes = b"",
        waiting: WaitingQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = token_budget(config, max_model_len)
        self._chunked = config.enable_chunked_prefill
        self._num_slots = config.max_num_seqs
        self._max_model_len = max_model_len
        self._capacity = capacity_tokens(layout, self._budget)
        self._kv = KVManager(
            layout,
            namespace=namespace,
            enable_prefix_caching=enable_prefix_caching,
            max_num_batched_tokens=self._budget,
        )
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        """All that are not finished."""
        self._waiting: WaitingQueue = FirstComeFirstServed() if waiting is None else waiting
        self._parking = Parking()
        """Waiting requests that are not in the queue, because a running one computes what they need."""
        self._running: list[Request] = []
        """In order of arrival: the last one is the first to be preempted."""
        self._in_flight: list[Request] = []
        """Those of the plan in flight, row by row; some may have been cancelled meanwhile."""
        self._free_slots = [Slot(slot) for slot in reversed(range(config.max_num_seqs))]
        self._releases: list[Slot] = []
        """Slots the executor is still to be told about; they may be given out again in the same plan."""
        self._step = 0
        self._tally = Tally()
        self._reported: tuple[int, int, float] = (0, 0, 0.0)

    # --- the world outside ------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished; then `plan` returns a plan."""
        return bool(self._requests)

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
        return len(self._waiting) + len(self._parking)

    @property
    def kv_usage(self) -> float:
        """Used share (0..1) of the fullest pool."""
        return self._kv.usage

    @property
    def max_request_tokens(self) -> int:
        """Most tokens, prompt and output together, that a request can come to."""
        return self._max_model_len if self._capacity is None else min(self._max_model_len, self._capacity)

    def add(self, spec: GenerateRequest) -> None:
        """Takes in a request. One that can never run gets its terminal ERROR event with the next output."""
        require(spec.request_id not in self._requests, f"two requests have the id {spec.request_id}")
        request = Request(spec, self._kv.sequence(spec.namespace), self._max_model_len)
        self._requests[spec.request_id] = request
        refusal = self._refusal(request)
        if refusal is not None:
            self._end(request, _error_event(request, refusal))
        else:
            self._waiting.add(request)

    def cancel(self, request_ids: Iterable[RequestId]) -> None:
        """Ends requests in whatever state with an ABORT event. Ids that are unknown or finished are ignored.

        If a step that computes a request is in flight, its blocks and slot are freed only by that step's commit, and its result is dropped.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.status is Status.RUNNING:
                self._running.remove(request)
            elif not self._parking.remove(request):
                self._waiting.remove(request)
            self._end(request, request.event(finish_reason=FinishReason.ABORT))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks that no request holds."""
        self._kv.reset_prefix_cache()

    def flush(self) -> EngineOutput | None:
        """An output outside of steps: waiting events, or a changed state. None when there is nothing to tell."""
        if not self._tally.events and self._state() == self._reported:
            return None
        return self._output()

    def abort_all(self) -> None:
        """Cancels everything."""
        self.cancel(list(self._requests))

    def kill_all(self, error: EngineDeadError) -> None:
        """Gives every unfinished request its terminal ERROR event and leaves all else as it is: the scheduler cannot be used any more."""
        now_s = self._clock()
        for request in self._requests.values():
            self._tally.events.append(_error_event(request, error))
            self._tally.finished.append(request.times(FinishReason.ERROR, now_s))
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
        """Decides the next step. None when there is nothing to compute."""
        require(not self._in_flight, "a plan was asked for while one is in flight")
        if not self._requests:
            return None
        budget = self._budget
        rows: list[RowPlan] = []
        running = self._running
        while len(rows) < len(running):
            request = running[len(rows)]
            if request.num_known - request.num_computed > self._kv.block_size:
                request.num_computed = self._kv.pick_up(request.blocks, request.token_ids, request.max_hit_tokens)
            count = min(request.num_known - request.num_computed, budget)
            self._kv.slide(request.blocks, request.num_computed)
            if self._kv.allocate(request.blocks, request.num_computed + count) is None:
                self._preempt_last()
                continue
            rows.append(self._row(request, count))
            budget -= count
        starts = self._admit(budget, rows)
        self._in_flight = running.copy()
        require(bool(rows), "requests are unfinished but none can run")
        for request in running:
            request.in_flight = True
        self._step += 1
        releases, self._releases = tuple(self._releases), []
        return StepPlan(
            step=self._step,
            releases=releases,
            starts=tuple(starts),
            rows=tuple(rows),
            num_tokens=sum(row.count for row in rows),
        )

    def _row(self, request: Request, count: int) -> RowPlan:
        start = request.num_computed
        kept_blocks, new_blocks = self._kv.tell(request.blocks)
        assert request.slot is not None
        return RowPlan(
            slot=request.slot,
            start=start,
            count=count,
            new_blocks=new_blocks,
            kept_blocks=kept_blocks,
            freed_blocks=self._kv.freed(request.blocks),
            sample=start + count == request.num_known and not request.at_length_limit,
        )

    def _admit(self, budget: int, rows: list[RowPlan]) -> list[SlotStart]:
        """Starts waiting requests in their order while budget, slots and blocks last; appends their rows."""
        starts: list[SlotStart] = []
        now_s = self._clock()
        for request in reversed(self._parking.take_ready()):
            self._waiting.put_back(request)
        while self._waiting and budget > 0 and len(self._free_slots) > len(self._parking):
            request = self._waiting.peek()
            hit = self._kv.lookup(request.blocks, request.token_ids, request.max_hit_tokens)
            awaited = self._kv.awaited(request.blocks, hit, request.max_hit_tokens)
            if awaited is not None:
                self._waiting.remove(request)
                self._parking.add(request, awaited)
                continue
            num_hit_tokens = hit * self._kv.block_size
            remaining = request.num_known - num_hit_tokens
            if remaining > budget and not self._chunked:
                break
            if not self._kv.fits(request.blocks, hit, request.num_known, reserve=len(self._running)):
                break
            self._waiting.remove(request)
            self._running.append(request)
            request.move(Status.RUNNING)
            request.slot = self._free_slots.pop()
            request.num_computed = num_hit_tokens
            self._kv.take_hit(request.blocks, hit)
            count = min(remaining, budget)
            self._kv.claim(request.blocks, request.token_ids)
            new_blocks = self._kv.allocate(request.blocks, num_hit_tokens + count)
            require(new_blocks is not None, "blocks were counted but are not there")
            starts.append(self._start(request))
            rows.append(self._row(request, count))
            budget -= count
            if request.scheduled_s is None:
                request.scheduled_s = now_s
                request.num_cached_tokens = num_hit_tokens
                if self._kv.caching and request.prompt_logprobs is None:
                    self._tally.prefix_cache_queries += request.num_prompt_tokens
                    self._tally.prefix_cache_hits += num_hit_tokens
        return starts

    def _start(self, request: Request) -> SlotStart:
        assert request.slot is not None
        return SlotStart(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.spec.sampling,
        )

    def _preempt_last(self) -> None:
        request = self._running.pop()
        request.move(Status.PREEMPTED)
        request.num_preemptions += 1
        request.num_computed = 0
        self._release(request)
        self._waiting.put_back(request)
        self._tally.num_preemptions += 1

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, step_s: float = 0.0) -> EngineOutput:
        """Applies a finished step, whose result passed `verify`: publishes full blocks, adds tokens, ends requests.

        `step_s` is how long the step took.
        """
        now_s = self._clock()
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
                self._advance(request, row, outcome, now_s)
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
            if len(outcome.token_ids) != row.sample:
                raise EngineError(
                    f"step {plan.step}, slot {row.slot}: got {len(outcome.token_ids)} tokens, expected {int(row.sample)}"
                )
            if request.prompt_logprobs is not None:
                expected = max(0, min(row.start + row.count, request.num_prompt_tokens - 1) - row.start)
                if len(outcome.prompt_logprobs or ()) != expected:
                    raise EngineError(f"step {plan.step}, slot {row.slot}: expected {expected} prompt logprobs")

    def fail(self, plan: StepPlan, error: OctavoError) -> EngineOutput:
        """Ends the requests of a step that raised, and only those. Nothing they computed in it counts.

        Nobody knows how much of the plan the executor applied, so the next plan releases its slots and repeats its releases.
        """
        for request in self._landed():
            if request.status is Status.FINISHED:
                self._release(request)
            else:
                self._end(request, _error_event(request, error))
        self._running = [request for request in self._running if request.status is Status.RUNNING]
        self._releases.extend(slot for slot in plan.releases if slot not in self._releases)
        return self._output()

    def _landed(self) -> Iterator[Request]:
        """The requests of the step in flight, which is so no longer."""
        landed, self._in_flight = self._in_flight, []
        for request in landed:
            request.in_flight = False
            yield request

    def _advance(self, request: Request, row: RowPlan, outcome: RowResult, now_s: float) -> None:
        if outcome.prompt_logprobs is not None:
            request.collect_prompt_logprobs(row.start, outcome.prompt_logprobs)
        if row.sample:
            token = outcome.token_ids[0]
            reason, stop_token = request.append(token)
            self._tally.num_generated_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = now_s
                self._tally.ttft_s.append(now_s - request.spec.arrival_s)
                self._tally.num_prompt_tokens += request.num_prompt_tokens
            else:
                self._tally.itl_s.append(now_s - request.last_token_s)
            request.last_token_s = now_s
            event = request.event((token,), outcome.logprobs, reason, stop_token)
            if reason is None:
                self._tally.events.append(event)
            else:
                self._end(request, event)
        elif request.num_computed == request.num_known:
            # Nothing was to be generated: the prompt was computed for its own sake.
            self._tally.num_prompt_tokens += request.num_prompt_tokens
            self._end(request, request.event(finish_reason=FinishReason.LENGTH))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, event: TokenEvent) -> None:
        """The one way a request ends: its terminal event goes out, and what it holds is freed as soon as no step uses it."""
        assert event.finish_reason is not None
        del self._requests[request.request_id]
        request.move(Status.FINISHED)
        self._tally.events.append(event)
        self._tally.finished.append(request.times(event.finish_reason, self._clock()))
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._kv.free(request.blocks)
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
            kv_usage=kv_usage,
            step_s=step_s,
            work=work,
        )

    # --- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises InvariantError unless requests, slots, tables and pools agree. Changes nothing. O(blocks and requests): for tests.

        May be called at any time, also while a plan is in flight.
        """
        cancelled = [request for request in self._in_flight if request.status is Status.FINISHED]
        holders = self._running + cancelled
        for request in self._running:
            require(request.status is Status.RUNNING, f"{request.request_id} runs but is {request.status.name}")
        for request in (*self._waiting, *self._parking):
            require(
                request.status in (Status.WAITING, Status.PREEMPTED),
                f"{request.request_id} waits but is {request.status.name}",
            )
            require(request.slot is None, f"{request.request_id} waits but has a slot")
            require(
                request.blocks.num_tokens == 0 and request.num_computed == 0,
                f"{request.request_id} waits but holds blocks",
            )
        known = {request.request_id for request in (*self._running, *self._waiting, *self._parking)}
        require(known == set(self._requests), "a request is lost: neither running nor waiting")
        require(
            len(known) == len(self._running) + len(self._waiting) + len(self._parking),
            "a request is both running and waiting, or twice in one",
        )
        slots = [request.slot for request in holders] + self._free_slots
        require(len(slots) == self._num_slots == len(set(slots)), "a slot is lost or has two owners")
        require(None not in slots, "a running request has no slot")
        require(len(self._releases) == len(set(self._releases)), "a slot is released twice")
        require(set(self._releases) <= set(self._free_slots), "a slot in use is to be released")
        partial = [request for request in self._running[:-1] if request.num_known - request.num_computed > 1]
        require(bool(self._in_flight) or not partial, "a running request before the last is partly computed")
        for request in holders:
            room, computed = request.blocks.num_tokens, request.num_computed
            require(computed <= room, f"{request.request_id}: {computed} tokens computed, room for {room}")
            require(computed < request.num_known, f"{request.request_id} runs but has nothing to compute")
            published = computed // self._kv.block_size if self._kv.caching else 0
            require(
                request.blocks.num_published == published,
                f"{request.request_id}: published blocks are not the computed ones",
            )
        self._kv.check(request.blocks for request in holders)

    def check_idle(self) -> None:
        """Raises InvariantError if blocks or slots are held although no request is unfinished. O(groups)."""
        if not self._requests and not self._in_flight:
            require(all(pool.num_free == pool.num_blocks for pool in self._kv.pools), "idle, but blocks are still held")
            require(len(self._free_slots) == self._num_slots, "idle, but slots are still held")


def _error_event(request: Request, error: OctavoError) -> TokenEvent:
    return request.event(finish_reason=FinishReason.ERROR, error_code=error.code, error_message=error.message)


def token_budget(config: SchedulerConfig, max_model_len: int) -> int:
    """Most tokens computed in one step: as configured, else enough for the settings beside it.

    Raises ConfigError when the settings contradict each other.
    """
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = max(DEFAULT_TOKEN_BUDGET, config.max_num_seqs, 0 if config.enable_chunked_prefill else max_model_len)
    if not 1 <= config.max_num_seqs <= MAX_NUM_SEQS:
        raise ConfigError(
            f"--max-num-seqs is {config.max_num_seqs}; it must be 1 to {MAX_NUM_SEQS}", param="max_num_seqs"
        )
    if budget < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) is below --max-num-seqs ({config.max_num_seqs}), so a step could not serve all running "
            "sequences; raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    if not config.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill computes a prompt in one step, so --max-num-batched-tokens ({budget}) must be at least "
            f"--max-model-len ({max_model_len}); raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    return budget
