"""The grammar side of the loop: requests that wait for their matcher, rows of a step that need a mask, matchers that follow tokens, and
tokens that need not be sampled because a grammar allows no other.

A request with a grammar reaches the scheduler only once its matcher is there, so that no step waits for one. A preempted request keeps
its matcher: it belongs to the request, not to a slot. This module does not know what a grammar is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from octavo.contracts import (
    EngineOutput,
    GenerateRequest,
    Grammar,
    RequestId,
    RowResult,
    Slot,
    StepMasks,
    StepPlan,
    StepResult,
)
from octavo.engine.scheduler import Scheduler
from octavo.errors import InvalidRequestError, UnsupportedFieldError

POLL_S = 0.002
"""How long an engine without other work waits before it looks for finished matchers again."""
SETTLE_S = 0.5
"""An engine that had nothing to do for so long gets its grammars ready, so that the first one does not hold up others."""


class Constraints:
    """Of one loop. Without a `grammar` requests that have one are refused. `jumps`: forced tokens are taken at once."""

    def __init__(self, scheduler: Scheduler, grammar: Grammar | None, *, jumps: bool = True) -> None:
        self._scheduler = scheduler
        self._grammar = grammar
        self._jumps = jumps
        self._held: dict[RequestId, GenerateRequest] = {}
        """Not yet the scheduler's."""
        self._open: dict[RequestId, bool] = {}
        """Have a matcher, held or scheduled. The value: whether they may jump."""
        self._bound: dict[Slot, RequestId] = {}
        self._prepared = grammar is None

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
            self._open[request.request_id] = self._jumps and _may_jump(request)
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

    def follow(self, result: StepResult) -> StepResult:
        """Moves matchers on by what was sampled. The result with the tokens that must follow."""
        if not self._bound or not self._open:
            return result
        return msgspec.structs.replace(result, rows=tuple(map(self._followed, result.rows)))

    def _followed(self, row: RowResult) -> RowResult:
        request_id = self._bound.get(row.slot)
        if not row.token_ids or request_id is None or self._grammar is None:
            return row
        jump = self._open.get(request_id)
        if jump is None:
            return row
        forced = self._grammar.advance(request_id, row.token_ids[0], jump=jump)
        return msgspec.structs.replace(row, token_ids=(*row.token_ids, *forced)) if forced else row

    def forget(self, output: EngineOutput) -> None:
        """Drops the matchers of finished requests."""
        if not self._open or self._grammar is None:
            return
        for event in output.events:
            if event.finish_reason is not None and self._open.pop(event.request_id, None) is not None:
                self._grammar.close(event.request_id)


def _may_jump(request: GenerateRequest) -> bool:
    """Whether a token that the grammar forces is certain to be what sampling would give, and nothing is wanted of it but the token."""
    sampling = request.sampling
    return (
        sampling.logprobs is None
        and sampling.allowed_token_ids is None
        and not sampling.bad_words
        and not (sampling.min_tokens and sampling.stop_token_ids)
    )
