"""The executor over a real model: step plan -> batch arrays -> logits -> sampled tokens.

It owns per-slot arrays (known tokens, block tables) and the model's memory. Knows no request states and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from octavo.backends.base import F32, I32, NOTHING_LEFT, BackendModel, Batch, RowMasks, Sampled
from octavo.contracts import (
    NULL_BLOCK,
    BlockTraffic,
    ForwardWork,
    KVLayout,
    RowPlan,
    RowResult,
    Slot,
    SlotStart,
    StepMasks,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.errors import EngineError
from octavo.runner.kv_files import KVFiles
from octavo.runner.offload import BlockMover

MIN_LOGIT_ROWS = 64
"""A forward returns at most this many rows of logits, or one per slot where there are more slots.

A prompt whose own logprobs are wanted needs one row per token; it is computed in pieces so that memory stays bounded.
"""


class _Segment(msgspec.Struct):
    """A row of the plan, or a part of one: positions start..start+count-1, of which the first `num_scored` are scored."""

    row: int
    slot: int
    start: int
    count: int
    num_scored: int
    sample: bool


class _Outcome(msgspec.Struct):
    """What became of a row so far."""

    sampled: Sampled | None = None
    scores: list[TokenLogprobs] = msgspec.field(default_factory=list)
    error: str | None = None


class ModelRunner:
    """`Executor` on a loaded model. One thread calls it."""

    def __init__(
        self,
        model: BackendModel,
        layout: KVLayout,
        *,
        max_num_seqs: int,
        max_model_len: int,
        kv_files: KVFiles | None = None,
    ) -> None:
        """Allocates the KV cache and takes over model and files: `close` closes them."""
        model.allocate_kv(layout)
        self._model = model
        self._mover = BlockMover(model, kv_files)
        self._sampler = model.make_sampler(max_num_seqs)
        self._max_logit_rows = max(MIN_LOGIT_ROWS, max_num_seqs)
        blocks_per_row = -(-max_model_len // layout.block_size)
        # A request may end with one token more than the context holds: sampled, never computed.
        self._tokens: I32 = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._tables: list[I32] = [np.full((max_num_seqs, blocks_per_row), NULL_BLOCK, np.int32) for _ in layout.groups]
        self._counting: I32 = np.arange(max_num_seqs + 1, dtype=np.int32)
        """Row starts and logit rows of a step in which every row computes and samples one token."""
        self._num_known = [0] * max_num_seqs
        self._num_blocks = [[0] * max_num_seqs for _ in layout.groups]
        self._starts: list[SlotStart | None] = [None] * max_num_seqs
        self._closed = False

    def submit(self, plan: StepPlan) -> _Step:
        """Applies the plan to the slots; the forward runs in `sample`."""
        for slot in plan.releases:
            self._release(slot)
        for start in plan.starts:
            self._start(start)
        for row in plan.rows:
            if row.forced:
                self._append(row)
            assert row.start + row.count <= self._num_known[row.slot], "a row computes tokens that are not known"
            self._update_tables(row)
        return _Step(self, plan)

    def close(self) -> None:
        """Closes the model. Idempotent."""
        if not self._closed:
            self._closed = True
            self._mover.close()
            self._model.close()

    # --- slots ------------------------------------------------------------------------------------------------------

    def _release(self, slot: int) -> None:
        if self._starts[slot] is None:  # the step that should have started it failed
            return
        self._starts[slot] = None
        self._sampler.stop(slot)
        for table, num_blocks in zip(self._tables, self._num_blocks, strict=True):
            table[slot, : num_blocks[slot]] = NULL_BLOCK
            num_blocks[slot] = 0

    def _start(self, start: SlotStart) -> None:
        known = np.array(start.token_ids, np.int32)
        self._tokens[start.slot, : len(known)] = known
        self._num_known[start.slot] = len(known)
        self._sampler.start(start.slot, start.sampling, known, start.num_prompt_tokens)
        self._starts[start.slot] = start

    def _append(self, row: RowPlan) -> None:
        self._know(row.slot, row.forced)
        self._sampler.extend(row.slot, np.array(row.forced, np.int32))

    def _know(self, slot: int, token_ids: Sequence[int]) -> None:
        known = self._num_known[slot]
        self._tokens[slot, known : known + len(token_ids)] = token_ids
        self._num_known[slot] = known + len(token_ids)

    def _update_tables(self, row: RowPlan) -> None:
        for group, blocks in enumerate(row.new_blocks):
            if row.kept_blocks is not None:
                self._tables[group][row.slot, row.kept_blocks :] = NULL_BLOCK
                self._num_blocks[group][row.slot] = row.kept_blocks
            if blocks:
                begin = self._num_blocks[group][row.slot]
                self._tables[group][row.slot, begin : begin + len(blocks)] = blocks
                self._num_blocks[group][row.slot] = begin + len(blocks)
        for group, freed in enumerate(row.freed_blocks):
            self._tables[group][row.slot, :freed] = NULL_BLOCK

    # --- a step -----------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, masks: StepMasks | None = None) -> StepResult:
        """Moves blocks, then computes and samples the rows of a submitted plan."""
        if plan.traffic is not None or plan.copies:
            self._mover.move(plan.traffic or BlockTraffic(), plan.copies)
        if plan.repeat > 1:
            return self._run_repeated(plan)
        outcomes = [_Outcome() for _ in plan.rows]
        work: ForwardWork | None = None
        for segments in self._pieces(plan.rows):
            self._run_piece(segments, outcomes, masks)
            work = _sum(work, self._model.last_work)
        return StepResult(
            step=plan.step,
            rows=tuple(map(_row_result, plan.rows, outcomes)),
            work=work,
            traffic=self._mover.report(waits=not plan.rows),
        )

    def _run_repeated(self, plan: StepPlan) -> StepResult:
        slots = [row.slot for row in plan.rows]
        batch = self._batch([_Segment(index, row.slot, row.start, 1, 0, True) for index, row in enumerate(plan.rows)])
        steps = self._model.decode(self._sampler, batch, slots, plan.repeat)
        rows = []
        for row, sampled in zip(plan.rows, zip(*steps, strict=True), strict=True):
            if sampled[-1].error is not None:
                rows.append(_row_result(row, _Outcome(sampled=sampled[-1])))
                continue
            tokens = tuple(one.token for one in sampled)
            self._know(row.slot, tokens)
            rows.append(RowResult(slot=row.slot, token_ids=tokens))
        return StepResult(
            step=plan.step, rows=tuple(rows), work=self._model.last_work, traffic=self._mover.report(waits=False)
        )

    def _pieces(self, rows: Sequence[RowPlan]) -> Iterator[list[_Segment]]:
        """Cuts a step into forwards of at most `_max_logit_rows` rows of logits; nearly always there is one."""
        piece: list[_Segment] = []
        free = self._max_logit_rows
        for index, row in enumerate(rows):
            start, end = row.start, row.start + row.count
            while start < end:
                num_scored = self._num_scored(row.slot, start, end)
                if num_scored + row.sample <= free:
                    piece.append(_Segment(index, row.slot, start, end - start, num_scored, row.sample))
                    free -= num_scored + row.sample
                    break
                if free:
                    count = min(num_scored, free)
                    piece.append(_Segment(index, row.slot, start, count, count, sample=False))
                    start += count
                yield piece
                piece, free = [], self._max_logit_rows
        if piece:
            yield piece

    def _num_scored(self, slot: int, start: int, end: int) -> int:
        """How many of the positions from `start` on have a next token within a prompt whose logprobs are wanted."""
        bound = self._starts[slot]
        if bound is None or bound.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(end, bound.num_prompt_tokens - 1) - start)

    def _run_piece(self, segments: list[_Segment], outcomes: list[_Outcome], masks: StepMasks | None) -> None:
        batch = self._batch(segments)
        # Made ready now, not when a forward has evicted from the caches all that Python needs.
        sampling = [segment for segment in segments if segment.sample]
        slots = [segment.slot for segment in sampling]
        positions = [segment.start + segment.count for segment in sampling]
        logits = self._model.forward(batch)
        begin = 0
        sample_rows: list[int] = []
        for segment in segments:
            if segment.num_scored:
                self._score(logits[begin : begin + segment.num_scored], segment, outcomes[segment.row])
                begin += segment.num_scored
            if segment.sample:
                sample_rows.append(begin)
                begin += 1
        if not sample_rows:
            return
        tokens = self._sampler.sample(
            logits if len(sample_rows) == len(logits) else logits[sample_rows],
            slots,
            positions,
            None if masks is None else _row_masks(masks, sampling),
        )
        for segment, token in zip(sampling, tokens, strict=True):
            outcomes[segment.row].sampled = token
            if token.error is None:
                self._tokens[segment.slot, self._num_known[segment.slot]] = token.token
                self._num_known[segment.slot] += 1

    def _batch(self, segments: list[_Segment]) -> Batch:
        slots = np.array([segment.slot for segment in segments], np.int32)
        starts = np.array([segment.start for segment in segments], np.int32)
        token_slots, positions = slots, starts
        row_starts, logit_rows = self._counting[: len(segments) + 1], self._counting[: len(segments)]
        if not all(segment.count == 1 and segment.sample and not segment.num_scored for segment in segments):
            counts = np.array([segment.count for segment in segments], np.int32)
            row_starts = np.zeros(len(segments) + 1, np.int32)
            np.cumsum(counts, out=row_starts[1:])
            token_slots = np.repeat(slots, counts)
            positions = np.arange(row_starts[-1], dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts)
            logit_rows = _logit_rows(segments, row_starts)
        return Batch(
            tokens=self._tokens[token_slots, positions],
            positions=positions,
            row_starts=row_starts,
            tables=tuple(
                table[:, : max(num_blocks[segment.slot] for segment in segments)].take(slots, axis=0)
                for table, num_blocks in zip(self._tables, self._num_blocks, strict=True)
            ),
            logit_rows=logit_rows,
        )

    def _score(self, logits: F32, segment: _Segment, outcome: _Outcome) -> None:
        bound = self._starts[segment.slot]
        assert bound is not None and bound.sampling.prompt_logprobs is not None
        first = segment.start + 1
        targets: list[int] = self._tokens[segment.slot, first : first + segment.num_scored].tolist()
        try:
            outcome.scores += self._sampler.score(logits, targets, bound.sampling.prompt_logprobs)
        except EngineError as error:  # unusable logits end this request, not the others of the step
            outcome.error = error.message


class _Step:
    """`StepHandle`."""

    def __init__(self, runner: ModelRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def sample(self, masks: StepMasks | None = None) -> StepResult:
        """Runs the forward and samples."""
        result = self._runner.run(self._plan, masks)
        return result if masks is None else _with_failures(result, masks)


def _row_masks(masks: StepMasks, sampling: list[_Segment]) -> RowMasks:
    """The masks of the rows that sample, once they are there."""
    bits = masks.wait()
    index = {slot: row for row, slot in enumerate(masks.slots)}
    return RowMasks(
        words=np.frombuffer(bits.words, np.uint32).reshape(-1, bits.num_words),
        rows=np.array([index.get(Slot(segment.slot), -1) for segment in sampling], np.int32),
    )


def _with_failures(result: StepResult, masks: StepMasks) -> StepResult:
    """A row without a mask says why it has none, rather than that no token was left."""
    failures = masks.wait().failures
    if not failures:
        return result
    reasons = {masks.slots[row]: reason for row, reason in failures.items()}
    rows = [
        msgspec.structs.replace(row, error=reasons[row.slot])
        if row.error == NOTHING_LEFT and row.slot in reasons
        else row
        for row in result.rows
    ]
    return msgspec.structs.replace(result, rows=tuple(rows))


def _logit_rows(segments: list[_Segment], row_starts: I32) -> I32:
    rows: list[int] = []
    for segment, begin in zip(segments, row_starts.tolist(), strict=False):
        rows.extend(range(begin, begin + segment.num_scored))
        if segment.sample:
            rows.append(begin + segment.count - 1)
    return np.array(rows, np.int32)


def _sum(a: ForwardWork | None, b: ForwardWork | None) -> ForwardWork | None:
    if a is None or b is None:
        return a or b
    return ForwardWork(
        forward_s=a.forward_s + b.forward_s,
        weight_bytes=a.weight_bytes + b.weight_bytes,
        kv_bytes=a.kv_bytes + b.kv_bytes,
        ops=a.ops + b.ops,
    )


def _row_result(row: RowPlan, outcome: _Outcome) -> RowResult:
    sampled = outcome.sampled
    error = outcome.error or (sampled.error if sampled else None)
    if error is not None:
        return RowResult(slot=row.slot, error=error, invalid_request=error == NOTHING_LEFT)
    return RowResult(
        slot=row.slot,
        token_ids=(sampled.token,) if sampled else (),
        logprobs=(sampled.logprobs,) if sampled and sampled.logprobs else None,
        prompt_logprobs=tuple(outcome.scores) or None,
    )
