"""The runner: plans become exact batches, and their results exact tokens and logprobs, whatever the cutting into steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from octavo.backends.base import BackendModel, Batch, Sampled, Sampler
from octavo.backends.numpy import NumpyBackend
from octavo.backends.numpy.backend import decode_step_by_step
from octavo.backends.numpy.sampler import NumpySampler
from octavo.contracts import (
    NULL_BLOCK,
    ForwardWork,
    KVLayout,
    RowPlan,
    RowResult,
    Slot,
    SlotStart,
    StepPlan,
    TokenSampling,
)
from octavo.models import ModelSpec, make_forward
from octavo.quant import Format
from octavo.runner.model_runner import MIN_LOGIT_ROWS, ModelRunner
from support.driver import layout_for, run
from support.tiny_models import random_tensors, tiny_spec

GREEDY = TokenSampling(max_tokens=100, temperature=0.0)
SPEC = tiny_spec()


class RecordingModel:
    """A `BackendModel` whose logits favour token (input token + 1), and that keeps every batch."""

    bytes_per_kv_value = 4.0
    bytes_per_kv_scale = 0
    weight_bytes = 0
    arithmetic = "fake"
    last_work = ForwardWork(forward_s=0.5, weight_bytes=100, kv_bytes=10, ops=1000)

    def __init__(self, vocab: int = 50) -> None:
        self.vocab = vocab
        self.batches: list[Batch] = []
        self.closed = 0

    def allocate_kv(self, layout: KVLayout) -> None:
        self.layout = layout

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        self.batches.append(batch)
        tokens = batch.tokens[batch.logit_rows]
        logits = np.zeros((len(tokens), self.vocab), np.float32)
        logits[np.arange(len(tokens)), (tokens + 1) % self.vocab] = 5.0
        logits[tokens == 13] = np.nan
        return logits

    def decode(self, sampler: Sampler, batch: Batch, slots: Sequence[int], most: int) -> list[list[Sampled]]:
        assert isinstance(sampler, NumpySampler)
        return decode_step_by_step(self, sampler, batch, slots, most)

    def make_sampler(self, max_num_seqs: int) -> NumpySampler:
        return NumpySampler(max_num_seqs, self.vocab)

    def close(self) -> None:
        self.closed += 1


def start(
    slot: int, token_ids: Sequence[int], sampling: TokenSampling = GREEDY, prompt: int | None = None
) -> SlotStart:
    return SlotStart(
        slot=Slot(slot),
        request_id=f"r{slot}",  # type: ignore[arg-type]
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids) if prompt is None else prompt,
        sampling=sampling,
    )


def row(
    slot: int,
    begin: int,
    count: int,
    *blocks: Sequence[int],
    sample: bool = False,
    freed: Sequence[int] = (),
    forced: Sequence[int] = (),
) -> RowPlan:
    return RowPlan(
        slot=Slot(slot),
        start=begin,
        count=count,
        new_blocks=tuple(tuple(group) for group in blocks),
        freed_blocks=tuple(freed),
        forced=tuple(forced),
        sample=sample,
    )


def step(
    runner: ModelRunner,
    *rows: RowPlan,
    starts: Sequence[SlotStart] = (),
    releases: Sequence[int] = (),
    repeat: int = 1,
) -> tuple[RowResult, ...]:
    plan = StepPlan(
        step=7,
        releases=tuple(Slot(slot) for slot in releases),
        starts=tuple(starts),
        rows=rows,
        num_tokens=sum(one.count for one in rows),
        repeat=repeat,
    )
    result = runner.submit(plan).sample()
    assert result.step == 7 and [one.slot for one in result.rows] == [one.slot for one in rows]
    return result.rows


def fake_runner(num_groups: int = 1) -> tuple[ModelRunner, RecordingModel]:
    model = RecordingModel()
    groups = layout_for(SPEC).groups * num_groups
    layout = KVLayout(block_size=4, groups=groups, num_blocks=(100,) * num_groups)
    return ModelRunner(model, layout, max_num_seqs=4, max_model_len=400), model


def test_batches_hold_exactly_what_the_plan_says() -> None:
    runner, model = fake_runner(num_groups=2)
    results = step(
        runner,
        row(2, 0, 5, (11, 12), (21, 22), sample=True),
        row(0, 0, 2, (13,), (23,)),
        starts=[start(2, [5, 6, 7, 8, 9]), start(0, [1, 2, 3])],
    )
    (batch,) = model.batches
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.row_starts.tolist() == [0, 5, 7]
    assert [table.tolist() for table in batch.tables] == [[[11, 12], [13, NULL_BLOCK]], [[21, 22], [23, NULL_BLOCK]]]
    assert batch.logit_rows.tolist() == [4]
    for array in (batch.tokens, batch.positions, batch.row_starts, *batch.tables, batch.logit_rows):
        assert array.dtype == np.int32 and array.flags.c_contiguous
    assert [one.token_ids for one in results] == [(10,), ()]

    results = step(
        runner,
        row(0, 2, 1, (), (), sample=True),
        row(2, 5, 1, (), (), sample=True, freed=(0, 1)),
    )
    batch = model.batches[1]
    assert batch.tokens.tolist() == [3, 10] and batch.positions.tolist() == [2, 5]
    assert batch.tables[0].tolist() == [[13, NULL_BLOCK], [11, 12]]
    assert batch.tables[1].tolist() == [[23, NULL_BLOCK], [NULL_BLOCK, 22]]
    assert [one.token_ids for one in results] == [(4,), (11,)]


def test_forced_tokens_are_computed_after_the_sampled_one_and_counted() -> None:
    runner, model = fake_runner()
    once = TokenSampling(max_tokens=9, temperature=0.0, frequency_penalty=100.0)
    (first,) = step(runner, row(1, 0, 2, (1,), sample=True), starts=[start(1, [4, 5], once)])
    assert first.token_ids == (6,)
    (second,) = step(runner, row(1, 2, 3, (2,), sample=True, forced=(20, 21)))
    assert model.batches[1].tokens.tolist() == [6, 20, 21]
    assert model.batches[1].positions.tolist() == [2, 3, 4]
    assert second.token_ids == (22,)
    (third,) = step(runner, row(1, 5, 2, (), sample=True, forced=(19,)))
    assert third.token_ids != (20,)  # it has been there


def test_a_released_slot_starts_afresh() -> None:
    runner, model = fake_runner()
    step(runner, row(1, 0, 9, (1, 2, 3), sample=True), starts=[start(1, range(9))])
    step(runner, row(1, 0, 2, (9,), sample=True), releases=[1], starts=[start(1, [30, 31])])
    assert model.batches[1].tables[0].tolist() == [[9]]
    assert model.batches[1].tokens.tolist() == [30, 31]


def test_release_of_a_slot_that_never_started_is_harmless() -> None:
    runner, _ = fake_runner()
    bad = start(0, [1, 49, 50])  # 50 is outside the vocabulary
    with pytest.raises(ValueError, match="50"):
        step(runner, row(0, 0, 3, (1,), sample=True), starts=[bad])
    assert step(runner, row(0, 0, 1, (1,), sample=True), releases=[0], starts=[start(0, [7])])[0].token_ids == (8,)


def test_computing_an_unknown_token_is_our_bug() -> None:
    runner, _ = fake_runner()
    with pytest.raises(AssertionError, match="not known"):
        step(runner, row(0, 0, 4, (1,)), starts=[start(0, [1, 2, 3])])


def test_unusable_logits_end_only_their_request() -> None:
    runner, _ = fake_runner()
    scored = TokenSampling(max_tokens=9, temperature=0.0, prompt_logprobs=1)
    results = step(
        runner,
        row(0, 0, 2, (1,), sample=True),
        row(1, 0, 2, (2,), sample=True),
        row(2, 0, 3, (3,), sample=True),
        starts=[start(0, [1, 13]), start(1, [1, 2]), start(2, [13, 4, 5], scored)],
    )
    assert results[0].error and not results[0].token_ids
    assert results[1].token_ids == (3,) and results[1].error is None
    assert results[2].error and results[2].prompt_logprobs is None


@pytest.mark.parametrize("cuts", [(300,), (1, 64, 63, 172), (65, 65, 65, 65, 40)])
def test_prompt_logprobs_of_a_long_prompt_keep_memory_bounded(cuts: Sequence[int]) -> None:
    """Entry i is about prompt token i + 1, and no forward returns more rows of logits than the bound."""
    runner, model = fake_runner()
    prompt = np.random.default_rng(0).choice([token for token in range(50) if token != 13], 300).tolist()
    scored = TokenSampling(max_tokens=9, temperature=0.0, prompt_logprobs=2, logprobs=1)
    begin, entries, starts = 0, [], [start(3, prompt, scored), start(0, [1, 2])]
    results: tuple[RowResult, ...] = ()
    for count in cuts:
        others = [row(0, 0, 2, (90,), sample=True)] if begin == 0 else []
        blocks = range(-(-begin // 4), -(-(begin + count) // 4))
        results = step(runner, row(3, begin, count, blocks, sample=begin + count == 300), *others, starts=starts)
        entries += results[0].prompt_logprobs or ()
        if others:
            assert results[1].token_ids == (3,)
        begin, starts = begin + count, []
    assert results[0].token_ids == ((prompt[-1] + 1) % 50,)
    assert [entry.token_ids[0] for entry in entries] == prompt[1:]
    assert all(len(entry.token_ids) == 3 for entry in entries)
    likely = [entry.logprobs[0] > -1.5 for entry in entries]
    assert likely == [(a + 1) % 50 == b for a, b in pairwise(prompt)]
    assert max(len(batch.logit_rows) for batch in model.batches) <= MIN_LOGIT_ROWS
    assert sum(len(batch.tokens) for batch in model.batches) == 302


def test_a_step_tells_the_work_of_all_its_forwards() -> None:
    runner, model = fake_runner()
    scored = TokenSampling(max_tokens=9, temperature=0.0, prompt_logprobs=0)
    plan = StepPlan(
        step=1,
        releases=(),
        starts=(start(0, [1] * 150, scored),),
        rows=(row(0, 0, 150, range(38), sample=True),),
        num_tokens=150,
    )
    result = runner.submit(plan).sample()
    assert len(model.batches) == 3
    assert result.work == ForwardWork(forward_s=1.5, weight_bytes=300, kv_bytes=30, ops=3000)


def test_no_prompt_logprobs_after_the_prompt() -> None:
    runner, _ = fake_runner()
    scored = TokenSampling(max_tokens=9, temperature=0.0, prompt_logprobs=0)
    (first,) = step(runner, row(0, 0, 5, (1, 2), sample=True), starts=[start(0, [1, 2, 3, 4, 5], scored, prompt=3)])
    assert first.prompt_logprobs is not None
    assert [entry.token_ids for entry in first.prompt_logprobs] == [(2,), (3,)]
    (second,) = step(runner, row(0, 5, 1, (), sample=True))
    assert second.prompt_logprobs is None and second.token_ids == (7,)


def test_close_is_idempotent() -> None:
    runner, model = fake_runner()
    runner.close()
    runner.close()
    assert model.closed == 1


# --- with a real model -------------------------------------------------------------------------------------------


def tiny(spec: ModelSpec) -> BackendModel:
    return NumpyBackend().load(make_forward(spec), random_tensors(spec, Format.F32), dtype="float32")


def greedy(spec: ModelSpec, prompt: Sequence[int], count: int) -> list[int]:
    """Token by token with the plain forward, everything computed again each time."""
    model, layout, tokens = tiny(spec), layout_for(spec), list(prompt)
    model.allocate_kv(layout)
    for _ in range(count):
        tokens.append(int(run(model, layout, [tokens], only_last=True)[0][0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("windows", [(), (None, 9)])
@pytest.mark.parametrize("cuts", [(30,), (7, 23), (16, 1, 13)])
def test_generation_equals_recomputing_from_scratch(cuts: Sequence[int], windows: tuple[int | None, ...]) -> None:
    spec = tiny_spec(windows=windows)
    prompt = np.random.default_rng(1).integers(0, spec.vocab_size, 30).tolist()
    expected = greedy(spec, prompt, 12)

    layout = layout_for(spec, block_size=8)
    runner = ModelRunner(tiny(spec), layout, max_num_seqs=2, max_model_len=64)
    generated: list[int] = []
    begin, held, starts = 0, 0, [start(1, prompt)]
    for count in (*cuts, *[1] * 11):
        end = begin + count
        blocks = tuple(range(held, -(-end // 8)))
        freed = tuple(max(0, begin - (group.window or begin + 1) + 1) // 8 for group in layout.groups)
        sample = end >= len(prompt)
        rows = step(
            runner, row(1, begin, count, *[blocks] * len(layout.groups), sample=sample, freed=freed), starts=starts
        )
        generated += rows[0].token_ids
        begin, held, starts = end, -(-end // 8), []
    assert generated == expected

    # Preempted after 5 tokens: everything known is computed again, in another slot and other blocks.
    known = [*prompt, *generated[:5]]
    blocks = tuple(range(20, 25))
    rows = step(
        runner,
        row(0, 0, 35, *[blocks] * len(layout.groups), sample=True),
        releases=[1],
        starts=[start(0, known, prompt=30)],
    )
    assert rows[0].token_ids == (expected[5],)


# --- several steps at once ------------------------------------------------------------------------------------------


def test_repeated_rows_go_on_from_what_they_sampled() -> None:
    runner, model = fake_runner()
    starts = [start(0, [1, 2, 3]), start(1, [7, 8])]
    step(runner, row(0, 0, 3, (5,), sample=True), row(1, 0, 2, (6,), sample=True), starts=starts)
    results = step(runner, row(0, 3, 1, (7,), sample=True), row(1, 2, 1, (), sample=True), repeat=3)
    assert [one.token_ids for one in results] == [(5, 6, 7), (10, 11, 12)]
    assert [batch.tokens.tolist() for batch in model.batches[1:]] == [[4, 9], [5, 10], [6, 11]]
    assert [batch.positions.tolist() for batch in model.batches[1:]] == [[3, 2], [4, 3], [5, 4]]
    (again, _) = step(runner, row(0, 6, 1, (), sample=True), row(1, 5, 1, (8,), sample=True))
    assert again.token_ids == (8,)


def test_a_repetition_ends_with_the_first_row_that_ends_or_fails() -> None:
    runner, _ = fake_runner()
    ending = TokenSampling(max_tokens=100, temperature=0.0, stop_token_ids=(6,))
    starts = [start(0, [1, 2, 3], ending), start(1, [7, 8])]
    step(runner, row(0, 0, 3, (5,), sample=True), row(1, 0, 2, (6,), sample=True), starts=starts)
    results = step(runner, row(0, 3, 1, (7, 9), sample=True), row(1, 2, 1, (8,), sample=True), repeat=9)
    assert [one.token_ids for one in results] == [(5, 6), (10, 11)]
    # Token 13 gives logits without a number: the other row keeps what it got beside it.
    results = step(runner, row(0, 5, 1, (), sample=True), row(1, 4, 1, (10,), sample=True), repeat=9)
    assert results[0].token_ids == (7, 8, 9) and results[0].error is None
    assert results[1].token_ids == () and results[1].error is not None
