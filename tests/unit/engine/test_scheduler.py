"""Plans in readable cases: who runs, how much of it, in which blocks, and how it ends."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest

from octavo.config import SchedulerConfig
from octavo.contracts import FinishReason, ForwardWork, GenerateRequest, RequestId, RowResult, StepPlan, StepResult
from octavo.engine import Scheduler, token_budget
from octavo.engine.blocks import InvariantError
from octavo.engine.policy import Fair
from octavo.engine.scheduler import LATELY
from octavo.errors import ConfigError, EngineDeadError, EngineError
from octavo.runner.scripted import ScriptedExecutor
from support.fake_executor import Answer, FakeDisk, Faults, Harness, alone, layout, request


def rows(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    assert plan is not None
    return [(row.slot, row.start, row.count, row.sample) for row in plan.rows]


def streaming(
    num_streams: int = 16, max_num_seqs: int = 20, max_num_batched_tokens: int = 128, **settings: Any
) -> Harness:
    """A scheduler with so many requests that decode."""
    harness = Harness(layout(400), max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **settings)
    harness.add(*(request(f"stream {number}", (number, 1, 2), max_tokens=9) for number in range(num_streams)))
    harness.run_steps(2)
    return harness


# --- one rule for prefill and decode --------------------------------------------------------------------------------


def test_a_prompt_is_computed_then_one_token_per_step() -> None:
    harness = Harness(layout(8))
    harness.add(request("a", range(6), max_tokens=3))
    plans = harness.run()
    assert [rows(plan) for plan in plans] == [[(0, 0, 6, True)], [(0, 6, 1, True)], [(0, 7, 1, True)]]
    assert [plan.rows[0].new_blocks for plan in plans] == [((0, 1),), ((),), ((),)]
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert plans[0].starts[0].token_ids == (0, 1, 2, 3, 4, 5)
    harness.check_answers()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    harness = Harness(layout(8), max_num_batched_tokens=8)
    harness.add(request("a", range(20), max_tokens=1))
    assert [rows(plan) for plan in harness.run()] == [[(0, 0, 8, False)], [(0, 8, 8, False)], [(0, 16, 4, True)]]


def test_several_prompts_share_a_step() -> None:
    harness = Harness(layout(20), max_num_batched_tokens=12)
    harness.add(request("a", range(5)), request("b", range(20, 24)), request("c", range(40, 46)))
    assert rows(harness.step()) == [(0, 0, 5, True), (1, 0, 4, True), (2, 0, 3, False)]
    assert rows(harness.step()) == [(0, 5, 1, True), (1, 4, 1, True), (2, 3, 3, True)]


def test_decodes_advance_in_every_step_beside_a_long_prompt() -> None:
    """O-30: the long prompt takes what the decodes leave of the budget, no more and no less."""
    harness = Harness(layout(100), max_num_batched_tokens=8, max_num_seqs=4)
    harness.add(request("short", range(4), max_tokens=20), request("long", range(4, 190), max_tokens=2))
    harness.add(request("other", range(90, 93), max_tokens=20))
    harness.step()
    while not harness.answer("short").finish_reason:
        before = len(harness.answer("short").token_ids)
        plan = harness.step()
        assert plan is not None
        assert plan.num_tokens == 8
        assert len(harness.answer("short").token_ids) == before + 1
    harness.run()
    harness.check_answers()


def test_every_running_request_advances_in_every_step() -> None:
    harness = Harness(layout(100), max_num_batched_tokens=4, max_num_seqs=4)
    harness.add(request("long", range(80), max_tokens=2))
    harness.step()
    harness.add(request("b", range(5)), request("c", range(6)), request("d", range(7)))
    for plan in harness.run():
        assert {start.slot for start in plan.starts} <= {row.slot for row in plan.rows}
        assert all(row.count >= 1 for row in plan.rows)
    harness.check_answers()


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    harness = Harness(layout(30), max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    harness.add(request("a", range(12)), request("b", range(20, 32)))
    assert rows(harness.step()) == [(0, 0, 12, True)]
    assert rows(harness.step()) == [(0, 12, 1, True), (1, 0, 12, True)]
    harness.run()
    harness.check_answers()


def test_at_most_max_num_seqs_run_in_the_order_of_arrival() -> None:
    harness = Harness(layout(30), max_num_seqs=2)
    harness.add(*(request(name, (ord(name) - 90, 1, 2), max_tokens=2) for name in "abc"))
    first = harness.step()
    assert first is not None
    assert [start.request_id for start in first.starts] == ["a", "b"]
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 1)
    harness.step()
    third = harness.step()
    assert third is not None
    assert third.releases == (0, 1)
    # The slot released last is given out first, in the same plan that tells of its release.
    assert [(start.request_id, start.slot) for start in third.starts] == [("c", 1)]


# --- how requests end -----------------------------------------------------------------------------------------------


def first_tokens(count: int) -> tuple[int, ...]:
    return alone(request("probe", range(5), max_tokens=count), layout(1).groups, 999).token_ids


def finish(**sampling: object) -> tuple[FinishReason | None, int | None, int]:
    harness = Harness(layout(20))
    harness.add(request("a", range(5), **{"max_tokens": 12, **sampling}))  # type: ignore[arg-type]
    harness.run()
    harness.check_answers()
    answer = harness.answer("a")
    return answer.finish_reason, answer.stop_token, len(answer.token_ids)


def test_finish_rules() -> None:
    tokens = first_tokens(12)
    third = tokens[2]
    assert tokens.index(third) == 2
    assert finish() == (FinishReason.LENGTH, None, 12)
    assert finish(eos_token_ids=(third,)) == (FinishReason.STOP, None, 3)
    assert finish(eos_token_ids=(third,), ignore_eos=True)[0] is FinishReason.LENGTH
    assert finish(stop_token_ids=(third,)) == (FinishReason.STOP, third, 3)
    assert finish(eos_token_ids=(third,), stop_token_ids=(third,)) == (FinishReason.STOP, None, 3)
    assert finish(eos_token_ids=(third,), stop_token_ids=(third,), ignore_eos=True) == (FinishReason.STOP, third, 3)
    assert finish(max_tokens=3, stop_token_ids=(third,)) == (FinishReason.STOP, third, 3)
    assert finish(max_tokens=0) == (FinishReason.LENGTH, None, 0)


def test_min_tokens_holds_end_tokens_off() -> None:
    """O-20, the engine's half: an end token within the first `min_tokens` tokens is not obeyed."""
    third = first_tokens(3)[2]
    assert finish(min_tokens=2, eos_token_ids=(third,)) == (FinishReason.STOP, None, 3)
    assert finish(min_tokens=3, max_tokens=3, eos_token_ids=(third,)) == (FinishReason.LENGTH, None, 3)
    assert finish(min_tokens=3, max_tokens=3, stop_token_ids=(third,)) == (FinishReason.LENGTH, None, 3)


def test_the_models_length_ends_a_request() -> None:
    harness = Harness(layout(20), max_model_len=8)
    harness.add(request("a", range(5), max_tokens=100))
    harness.run()
    harness.check_answers()
    assert len(harness.answer("a").token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "words"),
    [
        ((), 4, "invalid_value", "no tokens"),
        (range(64), 4, "context_length_exceeded", "64"),
        (range(65), 0, "context_length_exceeded", "65"),
        (range(40), 20, "context_length_exceeded", "KV cache holds 48"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(prompt: range, max_tokens: int, code: str, words: str) -> None:
    harness = Harness(layout(12), max_model_len=64)
    harness.add(request("a", prompt, max_tokens))
    assert harness.scheduler.max_request_tokens == 48
    assert harness.step() is None
    answer = harness.answer("a")
    assert (answer.finish_reason, answer.error_code) == (FinishReason.ERROR, code)
    assert words in (answer.error_message or "")
    assert not harness.scheduler.has_work


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_refused_request_leaves_no_trace_in_any_policy(policy: Literal["fcfs", "priority", "fair"]) -> None:
    scheduler = Scheduler(layout(12), SchedulerConfig(scheduling_policy=policy), max_model_len=64)
    scheduler.add(request("long", range(70), max_tokens=4))
    scheduler.add(request("fine", range(4), max_tokens=1))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, StepResult(step=1, rows=(RowResult(slot=plan.rows[0].slot, token_ids=(1,)),)))
    scheduler.check()
    scheduler.check_idle()


def test_a_request_of_exactly_the_pools_size_runs() -> None:
    harness = Harness(layout(12), max_model_len=64)
    harness.add(request("a", range(40), max_tokens=8))
    harness.run()
    harness.check_answers()


# --- prefix cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (3, 2), (4, 3), (5, 4), (12, 11), (13, 12)])
def test_a_repeated_prompt_is_found_whole_and_still_computes_the_last_token(length: int, cached: int) -> None:
    """O-28: BLK-1, BLK, BLK+1, 3xBLK tokens, cold and warm; a full hit still yields a first token."""
    harness = Harness(layout(20))
    prompt = range(length)
    harness.add(request("cold", prompt, logprobs=0))
    harness.run()
    harness.add(request("warm", prompt, logprobs=0))
    plan = harness.run()[0]
    harness.check_answers()
    assert harness.answer("cold").num_cached_tokens == 0
    assert harness.answer("warm").num_cached_tokens == cached
    assert rows(plan) == [(plan.rows[0].slot, cached, length - cached, True)]
    # The row brings the whole table, cached blocks first.
    assert plan.rows[0].new_blocks[0][: cached // 4] == tuple(range(cached // 4))


def test_warm_answers_equal_cold_ones_after_a_stop_an_abort_and_an_eviction() -> None:
    """O-28: whatever ended the earlier request, only fully computed blocks are found."""
    prompt = range(22)
    stop = alone(request("probe", prompt), layout(1).groups, 999).token_ids[1]
    harness = Harness(layout(12), max_num_batched_tokens=6)
    harness.add(request("stopped", prompt, stop_token_ids=(stop,)))
    harness.run()
    harness.add(request("after stop", prompt))
    harness.run()
    assert harness.answer("after stop").num_cached_tokens == 21
    harness.scheduler.reset_prefix_cache()
    harness.add(request("aborted", prompt))
    harness.step()
    harness.cancel("aborted")
    harness.add(request("after abort", prompt))
    harness.run()
    assert harness.answer("after abort").num_cached_tokens == 4  # 6 tokens were computed: one block of 4.
    harness.add(request("evicts", range(50, 84), max_tokens=8))
    harness.run()
    harness.add(request("after eviction", prompt))
    harness.run()
    assert harness.answer("after eviction").num_cached_tokens in range(0, 21, 4)
    harness.check_answers(except_for=["aborted"])


def test_generated_tokens_are_found_too() -> None:
    harness = Harness(layout(20))
    harness.add(request("turn 1", range(6), max_tokens=7))
    harness.run()
    conversation = (*range(6), *harness.answer("turn 1").token_ids, 1, 2)
    harness.add(request("turn 2", conversation))
    harness.run()
    harness.check_answers()
    # 13 tokens are known after turn 1, 12 of them computed.
    assert harness.answer("turn 2").num_cached_tokens == 12


def test_live_requests_share_the_blocks_of_their_prefix() -> None:
    harness = Harness(layout(20))
    harness.add(request("a", range(16), max_tokens=8))
    harness.step()
    harness.add(request("b", range(17), max_tokens=8))
    plan = harness.step()
    assert plan is not None
    assert plan.rows[1].new_blocks == ((0, 1, 2, 3, 5),)
    harness.run()
    harness.check_answers()


def test_a_prompt_that_is_being_computed_is_waited_for() -> None:
    harness = Harness(layout(20), max_num_batched_tokens=8)
    harness.add(request("a", range(18)), request("b", range(18)), request("c", (*range(8), 90, 91, 92)))
    # Blocks 0 to 3 can be shared with b, blocks 0 and 1 with c.
    assert rows(harness.step()) == [(0, 0, 8, False)]
    assert harness.scheduler.num_waiting == 2
    assert rows(harness.step()) == [(0, 8, 8, False)]
    assert rows(harness.step()) == [(0, 16, 2, True), (1, 16, 2, True), (2, 8, 3, True)]
    harness.run()
    harness.check_answers()
    assert harness.executor.num_computed == 18 + 2 + 3 + 3 * 3


def test_a_request_that_waits_for_nobody_starts_beside_one_that_waits() -> None:
    harness = Harness(layout(40), max_num_seqs=3, max_num_batched_tokens=20)
    harness.add(request("a", range(12)), request("b", range(12)), request("c", range(40, 44)))
    plan = harness.step()
    assert plan is not None
    assert [start.request_id for start in plan.starts] == ["a", "c"]
    # The third slot is kept for b.
    harness.add(request("d", range(60, 64)))
    assert [start.request_id for start in harness.step().starts] == ["b"]
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("end", ["cancel", "cancel in flight", "row fails", "step fails", "preempted"])
def test_who_waits_goes_on_when_the_one_it_waits_for_ends(end: str) -> None:
    """Whatever happens to it, the blocks are computed once more at most, and nobody hangs."""
    faults = Faults()
    harness = Harness(layout(14), max_num_batched_tokens=6, faults=faults)
    if end == "preempted":
        harness.add(request("first", range(50, 62), max_tokens=20))
        harness.run_steps(3)
    harness.add(request("a", range(22)), request("b", range(22)))
    harness.step()
    assert harness.scheduler.num_waiting >= 1
    lost = ["a"]
    match end:
        case "cancel":
            harness.cancel("a")
        case "cancel in flight":
            harness.step(cancel_in_flight=["a"])
        case "row fails":
            faults.rows.add(RequestId("a"))
        case "step fails":
            faults.sample.add(len(harness.executor.plans) + 1)
        case "preempted":
            lost = []
    harness.run()
    harness.check_answers(except_for=lost)


def test_blocks_published_meanwhile_are_picked_up_between_chunks() -> None:
    """A long prompt continues with what another request has generated since it began."""
    harness = Harness(layout(60), max_num_seqs=2, max_num_batched_tokens=2)
    generated = alone(request("a", range(10), max_tokens=24), layout(1).groups, 999).token_ids
    harness.add(request("a", range(10), max_tokens=24))
    while len(harness.outbox.answers.get("a", Answer()).token_ids) < 8:
        harness.step()
    # The prompt lies ahead of a's own answer, which is published while the prompt is computed a token at a time.
    harness.add(request("b", (*range(10), *generated, 1, 2, 3)))
    harness.run()
    harness.check_answers()
    kept = [row.kept_blocks for plan in harness.executor.plans for row in plan.rows if row.kept_blocks is not None]
    assert kept == [4]


def choices(prompt: range, count: int, **fields: object) -> list[GenerateRequest]:
    return [request(f"choice {index}", prompt, choice=index, **fields) for index in range(count)]


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 24, 40])
@pytest.mark.parametrize("window", [None, 6])
def test_choices_compute_their_prompt_once_and_copy_its_tail(length: int, window: int | None) -> None:
    harness = Harness(layout(40, 40, block_size=16, window=window), max_num_batched_tokens=10)
    harness.add(*choices(range(length), 4, max_tokens=20))
    harness.run()
    harness.check_answers()
    computed_once = length - 1 if (length - 1) % 16 not in range(1, 8) else (length - 1) // 16 * 16
    tails = length - 1 - computed_once
    assert harness.executor.num_computed <= computed_once + 4 * (1 + tails + 19)
    copies = [copy for plan in harness.executor.plans for copy in plan.copies]
    assert copies or (length - 1) % 16 == 0


def test_live_choices_share_the_memory_of_their_prompt() -> None:
    """16 sequences with a common prompt of 1,500 tokens take at most 20 % of the blocks of 16 others."""

    def most_used(same: bool) -> float:
        scheduler = Scheduler(
            layout(2000, block_size=16),
            SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, long_prefill_token_threshold=0),
            max_model_len=2048,
        )
        executor = ScriptedExecutor(lambda start: [1, 2, 3])
        for index in range(16):
            first = 0 if same else index
            scheduler.add(request(f"r{index}", [first, *range(1499)], max_tokens=60, choice=index))
        used, most_running = 0.0, 0
        while (plan := scheduler.plan()) is not None:
            used, most_running = max(used, scheduler.kv_usage), max(most_running, scheduler.num_running)
            scheduler.commit(plan, executor.submit(plan).sample())
        assert most_running == 16
        return used

    assert most_used(same=True) <= 0.2 * most_used(same=False)


def test_a_preempted_request_goes_on_from_its_tail() -> None:
    """With its blocks still there, it computes but the token it would have computed next."""
    harness = Harness(layout(12), max_num_seqs=2, max_num_batched_tokens=8)
    harness.add(request("a", range(6), max_tokens=22), request("b", range(40, 47), max_tokens=22))
    harness.run()
    harness.check_answers()
    preempted = sum(output.stats.num_preemptions for output in harness.outbox.outputs)
    assert preempted == 1
    assert harness.executor.num_computed <= 6 + 7 + 2 * 21 + 1 + 8


def test_namespaces_never_share() -> None:
    """O-29: salts and adapters of requests, and the model's own digest."""
    harness = Harness(layout(40))
    for name, namespace in (("a", b""), ("b", b"salt"), ("c", b"adapter")):
        harness.add(request(name, range(12), namespace=namespace))
        harness.run()
        assert harness.answer(name).num_cached_tokens == 0
    harness.add(request("again", range(12), namespace=b"salt"))
    harness.run()
    assert harness.answer("again").num_cached_tokens == 11


def test_prompt_logprobs_are_complete_with_a_warm_cache_and_chunks() -> None:
    """O-19, the engine's half."""
    harness = Harness(layout(20), max_num_batched_tokens=5)
    harness.add(request("warming", range(13)))
    harness.run()
    harness.add(request("scored", range(13), max_tokens=0, prompt_logprobs=0))
    plans = harness.run()
    harness.check_answers()
    answer = harness.answer("scored")
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 13
    assert answer.prompt_logprobs[0] is None
    assert answer.num_cached_tokens == 0
    assert [row.count for plan in plans for row in plan.rows] == [5, 5, 3]
    assert not any(row.sample for plan in plans for row in plan.rows)


def test_without_caching_nothing_is_reused() -> None:
    harness = Harness(layout(20), enable_prefix_caching=False)
    for name in "ab":
        harness.add(request(name, range(12)))
        harness.run()
        assert harness.answer(name).num_cached_tokens == 0
    assert all(output.stats.prefix_cache_queries == 0 for output in harness.outbox.outputs)


# --- preemption -----------------------------------------------------------------------------------------------------


def test_the_last_arrived_is_preempted_and_comes_back_with_its_tokens() -> None:
    harness = Harness(layout(4), enable_prefix_caching=False)
    harness.add(request("a", range(6), max_tokens=10), request("b", range(20, 26), max_tokens=10))
    harness.step()
    assert harness.scheduler.num_running == 1  # "b" would leave no block for "a" to grow into.
    harness = Harness(layout(6), enable_prefix_caching=False)
    harness.add(request("a", range(6), max_tokens=10), request("b", range(20, 26), max_tokens=10))
    harness.add(request("c", range(40, 43), max_tokens=2))
    preempting = None
    while preempting is None:
        plan = harness.step()
        assert plan is not None
        if harness.outbox.outputs[-1].stats.num_preemptions:
            preempting = plan
    assert preempting.releases == (1,)
    assert rows(preempting) == [(0, 12, 1, True)]
    kept = len(harness.answer("b").token_ids)
    assert kept == 7
    plans = harness.run()
    again = next(start for plan in plans for start in plan.starts)
    assert (again.request_id, len(again.token_ids), again.num_prompt_tokens) == ("b", 6 + kept, 6)
    assert [start.request_id for plan in plans for start in plan.starts] == ["b", "c"]
    harness.check_answers()


def test_preemption_does_not_change_answers() -> None:
    """O-27: a pool for 3 of 8 requests, with logprobs, stops and shared prompts among them."""
    specs = [
        request(
            f"r{index}", range(index % 3, 12 + 3 * index), max_tokens=20 + index, logprobs=0, stop_token_ids=(index,)
        )
        for index in range(8)
    ]
    need = max(-(-(len(spec.prompt_token_ids) + spec.sampling.max_tokens) // 4) for spec in specs)
    harness = Harness(layout(3 * need // 2), max_num_seqs=8, max_num_batched_tokens=32)
    harness.add(*specs)
    harness.run()
    harness.check_answers()
    assert sum(output.stats.num_preemptions for output in harness.outbox.outputs) > 0


def test_two_long_prompts_that_do_not_both_fit_do_not_evict_each_other() -> None:
    harness = Harness(layout(20), max_num_batched_tokens=8, enable_prefix_caching=False)
    harness.add(request("a", range(60), max_tokens=8), request("b", range(1, 61), max_tokens=8))
    harness.run()
    harness.check_answers()
    assert harness.executor.num_computed == 2 * (60 + 7)


def test_a_preempted_request_keeps_its_prompt_logprobs_and_its_stream() -> None:
    harness = Harness(layout(8), max_num_batched_tokens=8)
    harness.add(request("a", range(9), max_tokens=15), request("b", range(30, 39), max_tokens=15, prompt_logprobs=0))
    harness.run()
    harness.check_answers()
    finished = {times.request_id: times for output in harness.outbox.outputs for times in output.stats.finished}
    assert finished[RequestId("b")].num_preemptions > 0


def test_prompt_logprobs_survive_a_preemption_between_chunks() -> None:
    """What was scored before is neither repeated nor lost, however the recomputed chunks overlap it."""
    harness = Harness(layout(13), max_num_batched_tokens=3, max_num_seqs=2)
    harness.add(request("decodes", range(60, 64), max_tokens=24))
    harness.step()
    harness.step()
    harness.add(request("scored", range(40), max_tokens=2, prompt_logprobs=0))
    while not harness.outbox.outputs[-1].stats.num_preemptions:
        harness.step()
    assert "scored" not in harness.outbox.answers
    plans = harness.run()
    again = next(plan for plan in plans if plan.starts)
    assert 0 < again.rows[-1].start < 30
    harness.check_answers()


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_between_submit_and_commit_drops_the_result_and_frees_after_it() -> None:
    harness = Harness(layout(8))
    harness.add(request("a", range(6)), request("b", range(20, 26)))
    harness.step()
    plan = harness.scheduler.plan()
    assert plan is not None
    result = harness.executor.submit(plan).sample()
    used = harness.scheduler.kv_usage
    harness.cancel("a", "a", "unknown")
    assert harness.scheduler.num_running == 1
    assert harness.scheduler.kv_usage == used
    output = harness.scheduler.commit(plan, result)
    harness.scheduler.check()
    assert harness.scheduler.kv_usage < used
    assert [(event.request_id, event.finish_reason) for event in output.events] == [
        ("a", FinishReason.ABORT),
        ("b", None),
    ]
    assert output.events[0].token_ids == ()
    after = harness.step()
    assert after is not None
    assert after.releases == (0,)


def test_abort_in_every_state_leaks_nothing() -> None:
    """O-26: 500 loops, each aborting at a random moment of a request's life, beside others."""
    chance = random.Random(26)
    harness = Harness(layout(7), max_num_seqs=3, max_num_batched_tokens=6)
    seen = set()
    for loop in range(500):
        victim = request(f"v{loop}", range(chance.randrange(1, 15)), max_tokens=chance.randrange(1, 14))
        others = [request(f"o{loop}", range(chance.randrange(1, 15)), max_tokens=chance.randrange(1, 14))]
        first, second = (others, [victim]) if chance.random() < 0.7 else ([victim], others)
        harness.add(*first, *second)
        for _ in range(chance.randrange(8)):
            harness.step()
        state = next((r for r in harness.scheduler._requests.values() if r.request_id == victim.request_id), None)
        seen.add(("finished", False) if state is None else (state.status.name, state.num_generated > 0))
        if chance.random() < 0.5:
            harness.step(cancel_in_flight=[victim.request_id])
        else:
            harness.cancel(victim.request_id)
        if chance.random() < 0.3:
            harness.run()
    harness.run()
    harness.cancel("v0", "v499")
    assert all(pool.num_free == pool.num_blocks for pool in harness.scheduler._kv.pools)
    harness.check_answers(except_for=[name for name in harness.added if name.startswith("v")])
    assert {("WAITING", False), ("RUNNING", False), ("RUNNING", True), ("PREEMPTED", True), ("finished", False)} <= seen


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["submit_before", "submit_after", "sample"])
def test_a_step_that_raises_ends_its_requests_and_no_others(where: str) -> None:
    harness = Harness(layout(12), max_num_seqs=2, faults=Faults(**{where: {3}}))  # type: ignore[arg-type]
    harness.add(request("a", range(6), max_tokens=2), request("b", range(20, 26)), request("c", range(40, 46)))
    harness.step()
    harness.step()  # "a" ends and its slot is released by the next plan, which fails.
    harness.step()
    assert harness.answer("a").finish_reason is FinishReason.LENGTH
    for name in "bc":
        assert (harness.answer(name).finish_reason, harness.answer(name).error_code) == (
            FinishReason.ERROR,
            "engine_error",
        )
    assert harness.scheduler.kv_usage == 0.0
    harness.add(request("d", range(6)))
    plan = harness.step()
    assert plan is not None
    assert set(plan.releases) == {0, 1}
    harness.run()
    assert harness.answer("d").content == alone(harness.added["d"], harness.layout.groups, 256).content


def test_nothing_of_a_failed_step_is_cached() -> None:
    harness = Harness(layout(12), faults=Faults(sample={1}))
    harness.add(request("a", range(12)))
    harness.step()
    harness.add(request("b", range(12)))
    harness.run()
    assert harness.answer("b").num_cached_tokens == 0


def test_a_row_that_fails_ends_its_request_only() -> None:
    harness = Harness(layout(12), faults=Faults(rows={RequestId("a")}))
    harness.add(request("a", range(6)), request("b", range(20, 26)))
    harness.run()
    assert harness.answer("a").error_message == "the logits hold NaN"
    assert harness.answer("a").error_code == "engine_error"
    harness.check_answers(except_for=["a"])


def test_nothing_of_a_failed_row_is_cached() -> None:
    harness = Harness(layout(12), max_num_batched_tokens=8, faults=Faults(rows={RequestId("a")}))
    harness.add(request("a", range(13)))
    harness.run()
    harness.add(request("b", range(13)))
    harness.run()
    assert harness.answer("b").num_cached_tokens == 8  # What the first step computed, not what came with the error.


@pytest.mark.parametrize(
    "bad",
    [
        StepResult(step=2, rows=()),
        StepResult(step=1, rows=()),
        StepResult(step=1, rows=(RowResult(slot=0),)),  # type: ignore[arg-type]
        StepResult(step=1, rows=(RowResult(slot=1, token_ids=(5,)),)),  # type: ignore[arg-type]
        StepResult(step=1, rows=(RowResult(slot=0, token_ids=(5,)),)),  # type: ignore[arg-type]
    ],
)
def test_a_result_that_does_not_answer_the_plan_is_refused(bad: StepResult) -> None:
    harness = Harness(layout(12))
    harness.add(request("a", range(6), prompt_logprobs=0))
    plan = harness.scheduler.plan()
    assert plan is not None
    with pytest.raises(EngineError, match="step 1"):
        harness.scheduler.verify(plan, bad)


def test_the_work_of_a_step_is_in_its_statistics() -> None:
    harness = Harness(layout(12))
    harness.add(request("a", range(6)))
    plan = harness.scheduler.plan()
    assert plan is not None
    work = ForwardWork(forward_s=0.5, weight_bytes=100, kv_bytes=10, ops=1000)
    result = StepResult(step=1, rows=(RowResult(slot=plan.rows[0].slot, token_ids=(5,)),), work=work)
    assert harness.scheduler.commit(plan, result).stats.work == work


def test_killing_ends_everything_even_with_a_plan_in_flight() -> None:
    harness = Harness(layout(12), max_num_seqs=1)
    harness.add(request("a", range(6)), request("b", range(6)))
    harness.scheduler.plan()
    harness.scheduler.kill_all(EngineDeadError("it broke"))
    output = harness.scheduler.flush()
    assert output is not None
    assert [(event.request_id, event.error_code) for event in output.events] == [
        ("a", "engine_dead"),
        ("b", "engine_dead"),
    ]
    assert len(output.stats.finished) == 2


def test_an_id_that_is_in_use_is_our_bug() -> None:
    harness = Harness(layout(12))
    harness.add(request("a", range(6)))
    with pytest.raises(InvariantError, match="two requests"):
        harness.scheduler.add(request("a", range(6)))


# --- settings and statistics ----------------------------------------------------------------------------------------


def test_contradicting_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens .*--max-model-len"):
        token_budget(SchedulerConfig(max_num_batched_tokens=100, enable_chunked_prefill=False), 101)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens .*--max-num-seqs"):
        token_budget(SchedulerConfig(max_num_batched_tokens=3, max_num_seqs=4), 100)
    for wrong in (-1, 0, 10**9):
        with pytest.raises(ConfigError, match="--max-num-seqs"):
            token_budget(SchedulerConfig(max_num_seqs=wrong), 100)


def test_the_default_budget_suits_the_settings_beside_it() -> None:
    assert token_budget(SchedulerConfig(), 8192) == 512
    assert token_budget(SchedulerConfig(max_num_seqs=1000), 8192) == 1000
    assert token_budget(SchedulerConfig(enable_chunked_prefill=False), 8192) == 8192


def test_statistics_of_a_request() -> None:
    harness = Harness(layout(20))
    harness.clock.now_s = 10.0
    harness.add(request("a", range(6), max_tokens=3, arrival_s=9.5))
    harness.run()
    first, second, third = (output.stats for output in harness.outbox.outputs)
    assert (first.num_running, first.num_waiting, first.num_prompt_tokens, first.num_generated_tokens) == (1, 0, 6, 1)
    assert (first.kv_usage, first.step_s) == (0.1, 1.0)
    assert (first.prefix_cache_queries, first.prefix_cache_hits) == (6, 0)
    assert (first.ttft_s, first.itl_s) == ((1.5,), ())
    assert (second.num_prompt_tokens, second.ttft_s, second.itl_s) == (0, (), (1.0,))
    assert (third.num_running, third.kv_usage) == (0, 0.0)
    (times,) = third.finished
    assert (times.arrival_s, times.scheduled_s, times.first_token_s, times.finished_s) == (9.5, 10.0, 11.0, 13.0)
    assert (times.num_prompt_tokens, times.num_generated_tokens, times.max_tokens) == (6, 3, 3)
    assert times.finish_reason is FinishReason.LENGTH
    harness.add(request("b", range(6)))
    harness.run()
    assert harness.outbox.outputs[3].stats.prefix_cache_hits == 5


def test_first_tokens_are_told_first() -> None:
    harness = Harness(layout(60), max_num_batched_tokens=32)
    harness.add(request("a", range(6), 9), request("b", range(10, 16), 9))
    harness.step()
    harness.add(request("c", range(20, 26), 9), request("d", range(30, 32), 9))
    harness.step()
    assert [event.request_id for event in harness.outbox.outputs[-1].events] == ["c", "d", "a", "b"]


def test_a_changed_state_is_told_once_while_idle() -> None:
    harness = Harness(layout(20))
    assert harness.scheduler.flush() is None
    harness.add(request("a", range(6)))
    harness.step()
    harness.cancel("a")
    output = harness.scheduler.flush()
    assert output is not None
    assert (output.stats.num_running, output.stats.kv_usage) == (0, 0.0)
    assert harness.scheduler.flush() is None


def test_check_finds_a_lost_request_and_idle_leaks() -> None:
    harness = Harness(layout(20))
    harness.add(request("a", range(6)))
    harness.step()
    (running,) = harness.scheduler._running
    harness.scheduler._running.clear()
    with pytest.raises(InvariantError):
        harness.scheduler.check()
    del harness.scheduler._requests[running.request_id]
    with pytest.raises(InvariantError, match="idle"):
        harness.scheduler.check_idle()


# --- steps in parts ---------------------------------------------------------------------------------------------


def test_a_short_prompt_goes_ahead_of_many_others_of_its_step() -> None:
    harness = streaming()
    harness.add(request("short", range(40, 50), max_tokens=3))
    first, rest = harness.step(), harness.step()
    assert first is not None and rest is not None and first.step == rest.step
    assert rows(first) == [(16, 0, 10, True)]
    assert [row.slot for row in rest.rows] == list(range(16)) and not rest.starts
    assert len(harness.answer("short").token_ids) == 1
    following = harness.step()
    assert following is not None and following.step == rest.step + 1 and len(following.rows) == 17
    harness.run()
    harness.check_answers()


def test_prompts_that_come_while_others_go_ahead_join_the_step_as_far_as_it_has_room() -> None:
    """Of 12 tokens each, two parts go ahead; who comes during the second is computed with the others, however small."""
    harness = streaming(max_num_seqs=30)
    plans = []
    for number in range(4):
        harness.add(request(f"short {number}", range(20 * number, 20 * number + 12), max_tokens=3))
        plans.append(harness.step())
    assert [[count for _, _, count, _ in rows(plan)] for plan in plans] == [[12], [12], [1] * 16 + [12], [12]]
    assert [plan.step - plans[0].step for plan in plans if plan is not None and plans[0] is not None] == [0, 0, 0, 1]
    harness.run()
    harness.check_answers()


def test_prompts_that_join_do_not_go_ahead_beyond_their_share_of_tokens() -> None:
    """Three times 16 tokens may: 40 do, and 12 more are computed with the others."""
    harness = streaming(max_num_seqs=30)
    harness.add(request("short", range(40), max_tokens=3))
    harness.step()
    harness.add(request("late", range(60, 72), max_tokens=3))
    assert [count for _, _, count, _ in rows(harness.step())] == [1] * 16 + [12]


@pytest.mark.parametrize(("num_streams", "parts"), [(47, [47]), (48, [24, 24]), (73, [25, 24, 24])])
def test_many_decodes_are_computed_in_equal_parts_while_short_prompts_come(num_streams: int, parts: list[int]) -> None:
    harness = streaming(num_streams, max_num_seqs=100, max_num_batched_tokens=512)
    harness.run_steps(len(parts) - 1)
    plans = [harness.step() for _ in parts]
    assert [len(plan.rows) for plan in plans if plan is not None] == parts
    assert len({plan.step for plan in plans if plan is not None}) == 1
    slots = [row.slot for plan in plans if plan is not None for row in plan.rows]
    assert slots == list(range(num_streams))
    harness.run()
    harness.check_answers()


def test_a_prompt_that_comes_between_parts_of_decodes_goes_ahead_of_what_is_left() -> None:
    harness = streaming(48, max_num_seqs=60, max_num_batched_tokens=512)
    harness.run_steps(1)
    plans = [harness.step()]
    for number in range(2):
        harness.add(request(f"short {number}", range(20 * number, 20 * number + 12), max_tokens=3))
        plans.append(harness.step())
    assert [[count for _, _, count, _ in rows(plan)] for plan in plans] == [[1] * 24, [12], [1] * 24 + [12]]
    harness.run()
    harness.check_answers()


def test_decodes_are_computed_together_when_no_short_prompt_came_lately() -> None:
    harness = Harness(layout(2000), max_num_seqs=60, max_num_batched_tokens=512, max_model_len=200)
    harness.add(*(request(f"stream {number}", (number % 50, 1, 2), max_tokens=LATELY + 20) for number in range(48)))
    plans = [harness.step() for _ in range(LATELY + 70)]
    while plans[-1] is not None and plans[-1].step < LATELY + 10:
        plans.append(harness.step())
    sizes = [len(plan.rows) for plan in plans if plan is not None]
    assert sizes[1:3] == [24, 24] and sizes[-1] == 48
    harness.cancel(*harness.added)
    harness.run()


@pytest.mark.parametrize("settings", [{"least_part": None}, {"num_scheduler_steps": 2}])
def test_a_step_is_not_computed_in_parts_where_that_is_not_wanted(settings: dict[str, Any]) -> None:
    """By a backend whose forwards cost about the same for many tokens, or by who wants several steps in one go."""
    harness = streaming(48, max_num_seqs=60, max_num_batched_tokens=512, **settings)
    harness.add(request("short", range(40, 50), max_tokens=3))
    plan = harness.step()
    assert plan is not None and len(plan.rows) == 49
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_nobody_gives_way_to_one_that_joins_a_step(policy: str) -> None:
    """All slots are taken and what runs is in the step already: a more important prompt waits for the next one."""
    harness = streaming(17, max_num_seqs=18, scheduling_policy=policy)
    harness.add(request("short", range(40, 50), max_tokens=3))
    first = harness.step()
    harness.add(request("urgent", range(50, 60), max_tokens=3, priority=-9, tenant="other"))
    rest = harness.step()
    assert first is not None and rest is not None and rest.step == first.step
    assert len(rest.rows) == 17 and not rest.starts
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_nobody_gives_way_to_one_that_joins_between_parts_of_decodes(policy: str) -> None:
    """Those that are computed already are not the last in the policy's order, and would be computed for nothing."""
    harness = streaming(48, max_num_seqs=48, max_num_batched_tokens=512, scheduling_policy=policy)
    harness.run_steps(1)
    first = harness.step()
    harness.add(request("urgent", range(50, 60), max_tokens=3, priority=-9, tenant="other"))
    rest = harness.step()
    assert first is not None and rest is not None and rest.step == first.step
    assert len(rest.rows) == 24 and not rest.starts and not harness.outbox.outputs[-1].stats.num_preemptions
    harness.run()
    harness.check_answers()


def test_prompts_that_join_late_leave_less_room_to_those_of_the_next_step() -> None:
    """Between two tokens of a stream of the first part as many are computed as a step may hold: 48 and 1.5 times 4 * 48 of prompts."""
    harness = streaming(48, max_num_seqs=80, max_num_batched_tokens=512, max_model_len=200)
    harness.run_steps(1)
    plans = [harness.step()]
    for number in range(4):
        harness.add(request(f"short {number}", (90 - number, *(token % 90 for token in range(143))), max_tokens=1))
        if number % 2:
            plans.append(harness.step())
    plans.append(harness.step())
    first, late, following, later = (plan for plan in plans if plan is not None)
    assert first.step == late.step == following.step - 1 == later.step - 1
    assert [plan.num_tokens for plan in (first, late, following, later)] == [24, 24 + 288, 24, 24 + 288]
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("num_streams, num_tokens", [(15, 10), (16, 49)])
def test_nobody_goes_ahead_of_few_or_with_many_tokens(num_streams: int, num_tokens: int) -> None:
    harness = streaming(num_streams)
    harness.add(request("short", range(num_tokens), max_tokens=3))
    plan = harness.step()
    assert plan is not None and len(plan.rows) == num_streams + 1
    harness.run()
    harness.check_answers()


def test_cancels_between_the_parts_of_a_step() -> None:
    """Of one that went ahead, of one that is still to be computed, of all."""
    harness = streaming(17)
    harness.add(request("short", range(40, 50), max_tokens=3))
    harness.step()
    harness.cancel("short", "stream 3")
    rest = harness.step()
    assert rest is not None and rest.releases == (17,) and len(rest.rows) == 17
    harness.add(request("other", range(50, 60), max_tokens=3))
    harness.step()
    harness.cancel(*harness.added)
    assert harness.scheduler.has_work
    harness.run()
    harness.check_answers(except_for=list(harness.added))


def test_a_failed_first_part_ends_the_whole_step() -> None:
    """What the executor did of it nobody knows, and the rest relies on it: blocks were to be copied and loaded in it."""
    harness = streaming(faults=Faults(sample={3}))
    harness.add(request("short", range(40, 50), max_tokens=3))
    harness.step()
    assert all(harness.answer(name).finish_reason is FinishReason.ERROR for name in harness.added)
    assert not harness.scheduler.has_work
    harness.scheduler.check_idle()


def test_a_failed_rest_leaves_those_that_went_ahead() -> None:
    harness = streaming()
    harness.add(request("short", range(40, 50), max_tokens=3))
    first = harness.step()
    rest = harness.scheduler.plan()
    assert first is not None and rest is not None and rest.step == first.step
    harness.outbox.send(harness.scheduler.fail(rest, EngineError("broken")))
    harness.scheduler.check()
    harness.run()
    streams = [name for name in harness.added if name != "short"]
    assert all(harness.answer(name).finish_reason is FinishReason.ERROR for name in streams)
    harness.check_answers(except_for=streams)


def test_an_engine_may_end_between_the_parts_of_a_step() -> None:
    harness = streaming(disk_blocks=100)
    harness.add(request("short", range(40, 50), max_tokens=3))
    harness.step()
    harness.scheduler.abort_all()
    harness.scheduler.check()
    harness.scheduler.check_idle()
    assert harness.scheduler.farewell() is not None


# --- several steps at once ------------------------------------------------------------------------------------------


def test_decodes_are_repeated_while_none_can_end() -> None:
    """Two requests of 12 and 20 tokens, 8 at once: a step with the prompts, then until the first ends, then on."""
    harness = Harness(layout(40), num_scheduler_steps=8)
    harness.add(request("a", range(3), max_tokens=12), request("b", range(10, 14), max_tokens=20))
    plans = harness.run()
    assert [(len(plan.rows), plan.repeat) for plan in plans] == [(2, 1), (2, 8), (2, 3), (1, 8)]
    harness.check_answers()


def test_a_repetition_ends_early_where_a_row_ends() -> None:
    expected = alone(request("a", range(3), max_tokens=12), layout(40).groups, 256)
    harness = Harness(layout(40), num_scheduler_steps=8)
    harness.add(
        request("a", range(3), max_tokens=12, stop_token_ids=(expected.token_ids[4],)),
        request("b", range(10, 14), max_tokens=20),
    )
    harness.run_steps(2)
    assert harness.answer("a").finish_reason is FinishReason.STOP
    assert len(harness.answer("a").token_ids) == len(harness.answer("b").token_ids) == 5
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"grammar": "forces"}])
def test_nothing_is_repeated_beside_a_request_that_is_watched(fields: dict[str, object]) -> None:
    harness = Harness(layout(40), num_scheduler_steps=8)
    harness.add(request("a", range(3), max_tokens=6), request("b", range(10, 14), max_tokens=6, **fields))
    assert all(plan.repeat == 1 for plan in harness.run() if len(plan.rows) == 2)
    harness.check_answers()


def test_repeated_tokens_count_as_much_service_as_others() -> None:
    counters = []
    for steps in (1, 8):
        harness = Harness(layout(40), num_scheduler_steps=steps, scheduling_policy="fair")
        harness.add(request("a", range(3), max_tokens=40, tenant="a"))
        harness.run_steps(1 + 16 // steps)
        policy = harness.scheduler._policy
        assert isinstance(policy, Fair)
        counters.append(policy._tenants["a"].counter)
    assert counters[0] == counters[1]


def test_a_first_token_does_not_wait_for_others() -> None:
    """The last chunk of a prompt is one token, as of those that decode."""
    harness = Harness(layout(40), num_scheduler_steps=8, max_num_batched_tokens=8)
    harness.add(request("a", range(9), max_tokens=12))
    assert [plan.repeat for plan in harness.run()][:3] == [1, 1, 8]


def test_nothing_is_repeated_while_all_wait_for_the_disk() -> None:
    disk = FakeDisk(fetch_steps=3)
    first = Harness(layout(40), disk=disk, disk_blocks=40)
    first.add(request("a", range(40), max_tokens=2))
    first.run()
    plan = first.scheduler.farewell()
    assert plan is not None
    first.executor.submit(plan).sample()
    again = Harness(layout(40), disk=disk, disk_blocks=40, num_scheduler_steps=8)
    again.add(request("a", range(40), max_tokens=2))
    plans = again.run()
    assert not plans[0].rows and plans[0].repeat == 1
    assert again.answer("a").num_cached_tokens
    again.check_answers()


def test_nothing_is_repeated_where_blocks_or_prompts_are_in_the_way() -> None:
    harness = Harness(layout(2, block_size=4), num_scheduler_steps=8, max_num_batched_tokens=8)
    harness.add(request("a", range(3), max_tokens=2))
    harness.step()
    harness.add(request("b", range(10, 30), max_tokens=1))
    assert all(plan.repeat == 1 for plan in harness.run())
    tight = Harness(layout(3, block_size=4), num_scheduler_steps=8)
    tight.add(request("a", range(3), max_tokens=6), request("b", range(10, 13), max_tokens=6))
    plans = tight.run()
    assert plans[1].repeat == 1, "there are blocks for one of them"
    tight.check_answers()


def test_a_cancel_during_a_repetition_drops_all_of_it() -> None:
    harness = Harness(layout(40), num_scheduler_steps=8)
    harness.add(request("a", range(3), max_tokens=20), request("b", range(10, 14), max_tokens=20))
    harness.step()
    harness.step(cancel_in_flight=["a"])
    assert len(harness.answer("a").token_ids) == 1 and len(harness.answer("b").token_ids) == 9
    harness.run()
    harness.check_answers(except_for=["a"])
