"""The loop around the scheduler: order of delivery, idleness, failures, shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from octavo.config import SchedulerConfig
from octavo.contracts import (
    Add,
    Cancel,
    EngineInput,
    EngineOutput,
    FinishReason,
    RequestId,
    ResetPrefixCache,
    Shutdown,
    StepMasks,
    StepPlan,
    StepResult,
)
from octavo.engine import EngineLoop, Scheduler
from octavo.errors import EngineError
from support.fake_executor import (
    VOCABULARY,
    BlockingInbox,
    CollectingOutbox,
    FakeExecutor,
    Faults,
    ScriptedInbox,
    alone,
    layout,
    request,
)

KV = layout(20)
NOTHING: tuple[EngineInput, ...] = ()


def add(*names: str, max_tokens: int = 3) -> Add:
    return Add(tuple(request(name, prompt(name), max_tokens) for name in names))


def prompt(name: str) -> tuple[int, ...]:
    """Six tokens that no other name begins with."""
    return (ord(name[0]) % VOCABULARY, *range(5))


def cancel(*names: str) -> Cancel:
    return Cancel(tuple(RequestId(name) for name in names))


def run(
    *batches: Sequence[EngineInput], faults: Faults | None = None
) -> tuple[CollectingOutbox, FakeExecutor, ScriptedInbox]:
    """Runs a loop over scripted messages; an empty batch stands for a turn without any."""
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), max_model_len=64)
    executor, inbox, outbox = FakeExecutor(KV, 4, 64, faults), ScriptedInbox(*batches), CollectingOutbox()
    EngineLoop(scheduler, executor, inbox, outbox).run()
    assert executor.closed == 1
    return outbox, executor, inbox


def test_requests_run_to_their_end_and_the_last_events_come_without_a_further_step() -> None:
    outbox, executor, inbox = run([add("a", "b")], *[NOTHING] * 4, [Shutdown()])
    for name in "ab":
        assert outbox.answers[name].content == alone(request(name, prompt(name), 3), KV.groups, 64).content
    assert len(executor.plans) == len(outbox.outputs) == 3
    # It blocks only before the first message and after the last step's events are out.
    assert inbox.timeouts == [None, 0.0, 0.0, 0.0, None]


def test_a_step_is_submitted_before_the_events_of_the_one_before_are_delivered() -> None:
    order: list[str] = []

    class Executor(FakeExecutor):
        def submit(self, plan: StepPlan) -> FakeExecutor:
            order.append(f"submit {plan.step}")
            return super().submit(plan)

    class Outbox(CollectingOutbox):
        def send(self, output: EngineOutput) -> None:
            order.append(f"deliver {output.stats.step}")
            super().send(output)

    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4), max_model_len=64)
    inbox = ScriptedInbox([add("a")], *[NOTHING] * 4, [Shutdown()])
    EngineLoop(scheduler, Executor(KV, 4, 512), inbox, Outbox()).run()
    assert order == ["submit 1", "submit 2", "deliver 1", "submit 3", "deliver 2", "deliver 3"]


def test_a_cancel_ends_a_request_and_tells_that_nothing_runs() -> None:
    outbox, executor, _ = run([add("a", max_tokens=30)], NOTHING, [cancel("a", "gone")], NOTHING, [Shutdown()])
    assert outbox.answers["a"].finish_reason is FinishReason.ABORT
    assert len(executor.plans) == 2
    last = outbox.outputs[-1]
    assert [event.request_id for event in last.events] == ["a"]
    assert (last.stats.num_running, last.stats.num_waiting, last.stats.kv_usage) == (0, 0, 0.0)
    assert len(outbox.outputs) == 3


def test_while_idle_nothing_is_sent() -> None:
    outbox, executor, _ = run([cancel("unknown")], [ResetPrefixCache()], [cancel("unknown")], [Shutdown()])
    assert outbox.outputs == []
    assert executor.plans == []


def test_a_refusal_does_not_wait_for_a_step_to_end() -> None:
    outbox, _, _ = run([add("a")], [Add((request("empty", ()),))], *[NOTHING] * 3, [Shutdown()])
    sent = [[event.request_id for event in output.events] for output in outbox.outputs]
    assert sent == [["a"], ["empty"], ["a"], ["a"]]


def test_the_prefix_cache_can_be_reset() -> None:
    warm, _, _ = run([add("a")], *[NOTHING] * 4, [add("a2")], *[NOTHING] * 4, [Shutdown()])
    cold, _, _ = run([add("a")], *[NOTHING] * 4, [ResetPrefixCache(), add("a2")], *[NOTHING] * 4, [Shutdown()])
    assert (warm.answers["a2"].num_cached_tokens, cold.answers["a2"].num_cached_tokens) == (5, 0)


def test_shutdown_aborts_what_runs_and_what_came_with_it() -> None:
    outbox, _, _ = run([add("a", max_tokens=30)], NOTHING, [Shutdown(), add("late")])
    assert outbox.answers["a"].finish_reason is FinishReason.ABORT
    assert len(outbox.answers["a"].token_ids) == 2
    assert outbox.answers["late"].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("where", ["submit_before", "submit_after", "sample"])
def test_a_failing_step_ends_its_requests_and_the_loop_goes_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(**{where: {2}})  # type: ignore[arg-type]
    outbox, _, _ = run([add("a", "b")], NOTHING, [add("c")], *[NOTHING] * 4, [Shutdown()], faults=faults)
    for name in "ab":
        answer = outbox.answers[name]
        assert (answer.finish_reason, answer.error_code) == (FinishReason.ERROR, "engine_error")
        # Names the kind of failure; what an unknown exception says stays in the log.
        assert "RuntimeError" in (answer.error_message or "")
        assert "out of memory" not in (answer.error_message or "")
        assert len(answer.token_ids) == 1
    assert outbox.answers["c"].finish_reason is FinishReason.LENGTH
    assert "step 2 with 2 sequences failed" in caplog.text


def test_a_failing_request_in_a_step_leaves_the_others_alone() -> None:
    faults = Faults(rows={RequestId("a")})
    outbox, _, _ = run([add("a", "b")], *[NOTHING] * 5, [Shutdown()], faults=faults)
    assert outbox.answers["a"].finish_reason is FinishReason.ERROR
    assert outbox.answers["b"].finish_reason is FinishReason.LENGTH


def test_an_answer_that_does_not_fit_the_plan_fails_the_step_only() -> None:
    class Executor(FakeExecutor):
        def sample(self, masks: StepMasks | None = None) -> StepResult:
            result = super().sample()
            return StepResult(step=result.step, rows=()) if result.step == 1 else result

    outbox = CollectingOutbox()
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4), max_model_len=64)
    inbox = ScriptedInbox([add("a")], [add("b")], *[NOTHING] * 4, [Shutdown()])
    EngineLoop(scheduler, Executor(KV, 4, 512), inbox, outbox).run()
    assert outbox.answers["a"].error_code == "engine_error"
    assert outbox.answers["b"].finish_reason is FinishReason.LENGTH


def test_an_octavo_error_of_the_executor_is_told_as_it_is() -> None:
    class Executor(FakeExecutor):
        def submit(self, plan: StepPlan) -> FakeExecutor:
            raise EngineError("the device is gone")

    outbox = CollectingOutbox()
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4), max_model_len=64)
    inbox = ScriptedInbox([add("a")], NOTHING, [Shutdown()])
    EngineLoop(scheduler, Executor(KV, 4, 512), inbox, outbox).run()
    assert outbox.answers["a"].error_message == "the device is gone"


@pytest.mark.parametrize(
    ("method", "ends"),
    [
        ("plan", {"a": "engine_dead", "b": "engine_dead"}),
        ("commit", {"a": "engine_dead", "b": "engine_dead"}),
        # By then "a" has finished; its last event was not delivered yet and must not get lost.
        ("cancel", {"a": None, "b": "engine_dead"}),
    ],
)
def test_a_bug_of_the_scheduler_ends_everything_visibly(
    method: str, ends: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-41: nobody waits for an answer of a dead engine."""

    def broken(self: Scheduler, *arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Scheduler, method, broken)
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=1), max_model_len=64)
    executor, outbox = FakeExecutor(KV, 1, 512), CollectingOutbox()
    inbox = ScriptedInbox([add("a", "b", max_tokens=2)], NOTHING, [cancel("b")], *[NOTHING] * 4)
    with pytest.raises(KeyError, match="a bug"):
        EngineLoop(scheduler, executor, inbox, outbox).run()
    assert executor.closed == 1
    assert {name: answer.error_code for name, answer in outbox.answers.items()} == ends
    assert all(answer.finish_reason is not None for answer in outbox.answers.values())


def test_a_leak_is_reported_and_does_not_stop_the_service(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4), max_model_len=64)
    scheduler._kv.pools[0].allocate(1)
    outbox = CollectingOutbox()
    inbox = ScriptedInbox([cancel("unknown")], [add("a")], *[NOTHING] * 4, [Shutdown()])
    EngineLoop(scheduler, FakeExecutor(KV, 4, 512), inbox, outbox).run()
    assert "please report" in caplog.text
    assert outbox.answers["a"].finish_reason is FinishReason.LENGTH


def test_an_idle_loop_sleeps() -> None:
    inbox, outbox = BlockingInbox(), CollectingOutbox()
    scheduler = Scheduler(KV, SchedulerConfig(max_num_seqs=4), max_model_len=64)
    thread = threading.Thread(target=EngineLoop(scheduler, FakeExecutor(KV, 4, 512), inbox, outbox).run)
    thread.start()
    inbox.put(add("a"))
    deadline_s = time.monotonic() + 10
    while "a" not in outbox.answers or outbox.answers["a"].finish_reason is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    time.sleep(0.05)
    num_receives = inbox.num_receives
    time.sleep(0.1)
    assert inbox.num_receives == num_receives
    inbox.put(Shutdown())
    thread.join(10)
    assert not thread.is_alive()
