"""Requests with grammars in the loop: they wait for their matcher, follow their tokens, and end like others in every state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.config import SchedulerConfig
from octavo.contracts import (
    Add,
    Cancel,
    EngineInput,
    FinishReason,
    MaskBits,
    RequestId,
    Shutdown,
    Slot,
    StepMasks,
    StepResult,
)
from octavo.engine import EngineLoop, Scheduler
from support.fake_executor import CollectingOutbox, FakeExecutor, ScriptedInbox, layout, request

KV = layout(20)
A, B = RequestId("a"), RequestId("b")


class _Masks:
    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots

    def wait(self) -> MaskBits:
        return MaskBits(bytearray(), 0, {})


class Grammars:
    """Notes what it is told. `slow` matchers come after so many looks; the source "bad" has none."""

    def __init__(self, slow: int = 0) -> None:
        self.slow = slow
        self.log: list[tuple[object, ...]] = []
        self.pending: list[tuple[RequestId, str | None]] = []
        self.masked: list[list[RequestId]] = []

    def prepare(self) -> None:
        self.log.append(("prepare",))

    def open(self, request_id: RequestId, source: str) -> None:
        self.log.append(("open", request_id))
        self.pending.append((request_id, "it is bad" if source == "bad" else None))

    def opened(self) -> Sequence[tuple[RequestId, str | None]]:
        if self.slow:
            self.slow -= 1
            return []
        news, self.pending = self.pending, []
        return news

    def masks(self, rows: Sequence[tuple[Slot, RequestId]]) -> StepMasks:
        self.masked.append([request_id for _, request_id in rows])
        return _Masks([slot for slot, _ in rows])

    def advance(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self.log.append(("advance", request_id, *token_ids))

    def close(self, request_id: RequestId) -> None:
        self.log.append(("close", request_id))


class Executor(FakeExecutor):
    """Notes which slots came with masks."""

    def sample(self, masks: StepMasks | None = None) -> StepResult:
        self.slots = [*getattr(self, "slots", []), None if masks is None else list(masks.slots)]
        return super().sample(masks)


def run(grammars: Grammars | None, *batches: Sequence[EngineInput]) -> tuple[CollectingOutbox, Executor]:
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), max_model_len=64)
    executor, outbox = Executor(KV, 4, 64), CollectingOutbox()
    EngineLoop(scheduler, executor, ScriptedInbox(*batches), outbox, grammar=grammars).run()
    return outbox, executor


def add(name: str, grammar: str | None = "g", max_tokens: int = 3) -> Add:
    return Add((msgspec.structs.replace(request(name, (1, 2, 3), max_tokens), grammar=grammar),))


def test_a_request_waits_for_its_matcher_and_is_followed_to_its_end() -> None:
    grammars = Grammars(slow=2)
    outbox, executor = run(grammars, [add("a"), add("b", None)], *[[]] * 8, [Shutdown()])
    assert outbox.answers[A].finish_reason is outbox.answers[B].finish_reason is FinishReason.LENGTH
    tokens = outbox.answers[A].token_ids
    assert [entry for entry in grammars.log if entry != ("prepare",)] == [
        ("open", A),
        ("advance", A, tokens[0]),
        ("advance", A, tokens[1]),
        ("close", A),
    ]
    assert grammars.masked == [[A]] * 3
    # The other one ran while the matcher was being made.
    assert executor.slots[:2] == [None, None]
    assert sum(slots is not None for slots in executor.slots) == 3


def test_without_a_matcher_the_request_ends_alone() -> None:
    outbox, _ = run(Grammars(), [add("a", "bad"), add("b")], *[[]] * 6, [Shutdown()])
    assert outbox.answers[A].finish_reason is FinishReason.ERROR
    assert outbox.answers[A].error_code == "invalid_value"
    assert outbox.answers[A].error_message == "it is bad"
    assert outbox.answers[B].finish_reason is FinishReason.LENGTH


def test_an_engine_without_grammars_refuses_by_name() -> None:
    outbox, _ = run(None, [add("a"), add("b", None)], *[[]] * 6, [Shutdown()])
    assert outbox.answers[A].error_code == "unsupported_parameter"
    assert outbox.answers[B].finish_reason is FinishReason.LENGTH


def test_cancelled_while_it_waits_and_while_it_runs() -> None:
    waiting = Grammars(slow=100)
    outbox, _ = run(waiting, [add("a")], [Cancel((A,))], [], [Shutdown()])
    assert outbox.answers[A].finish_reason is FinishReason.ABORT
    assert ("close", A) in waiting.log
    running = Grammars()
    outbox, _ = run(running, [add("a", max_tokens=30)], [], [Cancel((A,))], [], [Shutdown()])
    assert outbox.answers[A].finish_reason is FinishReason.ABORT
    assert running.log.count(("close", A)) == 1


def test_shutdown_ends_those_that_wait() -> None:
    outbox, _ = run(Grammars(slow=100), [add("a")], [Shutdown()])
    assert outbox.answers[A].finish_reason is FinishReason.ABORT


def test_an_engine_at_rest_gets_ready_once() -> None:
    grammars = Grammars()
    run(grammars, [], [], [add("b", None)], *[[]] * 5, [Shutdown()])
    assert grammars.log == [("prepare",)]
