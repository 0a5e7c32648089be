"""Requests with grammars in the loop: they wait for their matcher, follow their tokens, and end like others in every state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

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
from support.fake_executor import VOCABULARY, CollectingOutbox, FakeExecutor, ScriptedInbox, layout, request

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
        self.forced: tuple[int, ...] = ()

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

    def advance(self, request_id: RequestId, token: int, *, jump: bool) -> Sequence[int]:
        self.log.append(("advance", request_id, token))
        return self.forced if jump else ()

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
        ("advance", A, tokens[2]),
        ("close", A),
    ]
    assert grammars.masked == [[A]] * 3
    # The other one ran while the matcher was being made.
    assert executor.slots[:2] == [None, None]
    assert sum(slots is not None for slots in executor.slots) == 3


def test_forced_tokens_are_not_sampled() -> None:
    """They count like others, also those that the limit cuts off, and what follows depends on them."""
    grammars = Grammars()
    grammars.forced = (5, 6)
    outbox, executor = run(grammars, [add("a", max_tokens=8)], *[[]] * 8, [Shutdown()])
    answer = outbox.answers[A]
    assert answer.finish_reason is FinishReason.LENGTH
    assert [answer.token_ids[place] for place in (1, 2, 4, 5, 7)] == [5, 6, 5, 6, 5]
    assert len(answer.token_ids) == 8
    assert [len(event.token_ids) for output in outbox.outputs for event in output.events] == [3, 3, 2]
    assert [row.count for plan in executor.plans for row in plan.rows] == [3, 3, 3]
    assert sum(output.stats.num_generated_tokens for output in outbox.outputs) == 8
    prompt = (1, 2, 3, *answer.token_ids[:3])
    afresh, _ = run(None, [Add((request("a", prompt, 1),))], *[[]] * 3, [Shutdown()])
    assert afresh.answers[A].token_ids == answer.token_ids[3:4]


def test_nothing_comes_after_the_end() -> None:
    """O-32: the end may stand among forced tokens; what follows it there is no output, and nobody asks for a mask after it."""
    grammars = Grammars()
    grammars.forced = (5, 6)
    ending = [
        Add((msgspec.structs.replace(request(name, (1, 2, 3), 9, eos_token_ids=(5,)), grammar="g"),)) for name in "ab"
    ]
    outbox, _ = run(grammars, ending, *[[]] * 4, [Shutdown()])
    for name in (A, B):
        assert outbox.answers[name].finish_reason is FinishReason.STOP
        assert outbox.answers[name].token_ids[1:] == (5,)
        assert grammars.log.count(("close", name)) == 1
    assert [name for names in grammars.masked for name in names] == [A, B]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"allowed_token_ids": tuple(range(VOCABULARY))},
        {"bad_words": ((1,),)},
        {"min_tokens": 1, "stop_token_ids": (200,)},
    ],
)
def test_what_sampling_might_refuse_or_tell_of_is_sampled(fields: dict[str, Any]) -> None:
    grammars = Grammars()
    grammars.forced = (5, 6)
    spec = msgspec.structs.replace(request("a", (1, 2, 3), 4, **fields), grammar="g")
    outbox, executor = run(grammars, [Add((spec,))], *[[]] * 8, [Shutdown()])
    assert [row.count for plan in executor.plans for row in plan.rows] == [3, 1, 1, 1]
    assert outbox.answers[A].token_ids[1:3] != (5, 6)


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
