"""What a step costs: measured on a loaded model, and said again by few terms, for the simulator to add up.

    seconds of a step = tokens(T) + sampled * S + decode_pairs * D + prefill_pairs * P

T: tokens computed in the step, with a piecewise linear `tokens` (every token passes the same matrices, whose cost per token falls with
their number). S: rows that sample (head and sampler). D: positions that rows of one token attend to, P: those that the tokens of longer
rows attend to (attention). The terms are never negative and have the least sum of relative errors' amounts, so that moments in which the
machine was busy with something else do not pull them. The fit's errors are kept beside them.

Points are measured as a server would run them: slots fill with different content chunk by chunk, since memory that was never written is
faster to read. `scheduler` is the Python around a step: planning, committing.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.backends import make_backend
from octavo.bench import results
from octavo.config import Config, SchedulerConfig
from octavo.contracts import (
    Executor,
    GenerateRequest,
    KVGroup,
    KVLayout,
    RequestId,
    RowPlan,
    RowResult,
    Slot,
    SlotStart,
    StepPlan,
    StepResult,
    TokenSampling,
)
from octavo.engine import DEFAULT_LEAST_PART, Scheduler
from octavo.errors import ConfigError
from octavo.frontend.build import Budget, budget_memory, resolve_scheduler
from octavo.loaders.checkpoint import open_checkpoint
from octavo.obs.machine import free_memory_bytes
from octavo.runner.load import load_model
from octavo.runner.model_runner import ModelRunner

F64 = npt.NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""Called with (what comes next, points done, points in all)."""

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHARE_OF_STAGES = ((96, 1.0), (400, 0.25), (1500, 0.05), (5000, 0.02))
"""(context, share of the slots that are filled so far): few long ones, as the cache and patience are limited."""
_REPEATS = 5
_ROOM_FOR_SAMPLES = 400
"""Every step that samples adds a known token to its slot, computed or not."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The terms, in seconds. `tokens` at `token_knots`, linear between them and beyond the last."""

    token_knots: tuple[int, ...]
    tokens: tuple[float, ...]
    sampled: float
    decode_pairs: float
    prefill_pairs: float

    def step_s(self, rows: Sequence[RowPlan]) -> float:
        """What a step with these rows takes."""
        total = sampled = decode_pairs = prefill_pairs = 0
        for row in rows:
            count = row.count
            total += count
            sampled += row.sample
            if count == 1:
                decode_pairs += row.start + 1
            else:
                prefill_pairs += count * row.start + count * (count + 1) // 2
        return (
            self._tokens_s(total)
            + self.sampled * sampled
            + self.decode_pairs * decode_pairs
            + self.prefill_pairs * prefill_pairs
        )

    def _tokens_s(self, total: int) -> float:
        knots, seconds = self.token_knots, self.tokens
        if len(knots) == 1:
            return seconds[0] * total / knots[0]
        right = min(max(bisect.bisect_left(knots, total), 1), len(knots) - 1)
        low, high = knots[right - 1], knots[right]
        return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * (total - low) / (high - low)


class ServingCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What server and client on this machine add, in seconds: per step, per token streamed, and per request before its first step."""

    step: float = 0.0
    token: float = 0.0
    request: float = 0.0


class SchedulerCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Planning and committing a step, in seconds: once, and per row."""

    step: float = 0.0
    row: float = 0.0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides how much KV cache there is, and in what parts steps are computed. Sizes in bytes, lengths in tokens."""

    name: str
    max_context: int
    groups: tuple[KVGroup, ...]
    weight_bytes: int
    free_bytes: int
    vocab_size: int
    least_part: int | None = DEFAULT_LEAST_PART


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the simulator knows of a model on a machine."""

    model: ModelFacts
    step: StepCosts
    scheduler: SchedulerCosts = SchedulerCosts()
    serving: ServingCosts = ServingCosts()


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step. `rows` are (start, count, sample)."""

    rows: tuple[tuple[int, int, bool], ...]
    seconds: float

    def plan(self) -> list[RowPlan]:
        """The rows as the cost model reads them."""
        return [
            RowPlan(slot=Slot(slot), start=start, count=count, new_blocks=(), sample=sample)
            for slot, (start, count, sample) in enumerate(self.rows)
        ]


def measure(config: Config, progress: Progress | None = None) -> tuple[Costs, list[Point]]:
    """Loads the configured model, measures steps of many shapes and fits the terms.

    Raises ConfigError when the KV cache is too small to measure in, and what loading raises.
    """
    checkpoint = open_checkpoint(config.model.model, revision=config.model.revision)
    free_bytes = free_memory_bytes()
    loaded = load_model(
        checkpoint, make_backend(config.backend), dtype=config.model.dtype, kv_dtype=config.cache.kv_cache_dtype
    )
    executor: Executor | None = None
    try:
        groups = loaded.spec.kv_groups(loaded.model.bytes_per_kv_value, loaded.model.bytes_per_kv_scale)
        if len(groups) > 1:
            raise ConfigError("costs of models with several kinds of KV (sliding windows) cannot be measured yet")
        facts = ModelFacts(
            name=config.model.model,
            max_context=loaded.spec.max_context,
            groups=groups,
            weight_bytes=loaded.model.weight_bytes,
            free_bytes=free_bytes,
            vocab_size=loaded.spec.vocab_size,
            least_part=loaded.model.least_part,
        )
        budget = budget_memory(config, groups, facts.max_context, free_bytes, facts.weight_bytes)
        scheduling = resolve_scheduler(config.scheduler, budget.max_model_len)
        executor = ModelRunner(
            loaded.model, budget.layout, max_num_seqs=scheduling.max_num_seqs, max_model_len=budget.max_model_len
        )
        points = _Bench(executor, facts, budget, scheduling).points(progress or (lambda *_: None))
    finally:
        (executor or loaded.model).close()
    return Costs(model=facts, step=fit(points), scheduler=measure_scheduler()), points


class _Bench:
    """Fills slots with random tokens and times the steps that do it and decodes between them."""

    def __init__(self, executor: Executor, facts: ModelFacts, budget: Budget, scheduling: SchedulerConfig) -> None:
        assert scheduling.max_num_batched_tokens is not None
        self._executor = executor
        self._block_size = budget.layout.block_size
        self._num_slots, self._budget = scheduling.max_num_seqs, scheduling.max_num_batched_tokens
        self._max_tokens = budget.max_model_len - _ROOM_FOR_SAMPLES
        self._free_blocks = list(range(budget.layout.num_blocks[0]))
        self._vocab = facts.vocab_size
        self._known = [0] * self._num_slots
        """Tokens computed per slot."""
        self._blocks = [0] * self._num_slots
        self._step = 0
        if self._max_tokens < 2 * _SHARE_OF_STAGES[0][0]:
            raise ConfigError(
                f"costs need a context of at least {_ROOM_FOR_SAMPLES + 2 * _SHARE_OF_STAGES[0][0]} tokens"
            )

    def points(self, report: Progress) -> list[Point]:
        """All measured points, in a fixed order: chunks of prompts, decodes at several contexts, both together."""
        self._start_all()
        found = self._whole_prompts()
        stages = list(self._stages())
        for done, (context, slots) in enumerate(stages):
            report(f"{slots} rows of {context} tokens", done, len(stages))
            found += self._fill(slots, context)
            for rows in [rows for rows in _DECODES if rows < slots] + [slots]:
                found.append(self._repeated([(slot, 1, True) for slot in range(rows)], _REPEATS))
            found += self._mixed(slots)
        report("done", len(stages), len(stages))
        return found

    def _whole_prompts(self) -> list[Point]:
        """Prompts of many lengths, each computed in one step, in the last slots: what comes after begins with the first."""
        sizes = [knot for knot in _KNOTS if 8 <= knot < self._budget] + [self._budget]
        slots = range(self._num_slots - 1, -1, -1)
        return [
            self._repeated([(slot, count, True)], 1)
            for slot, count in zip(slots, reversed(sizes), strict=False)
            if self._room(slot, count)
        ]

    def _stages(self) -> Iterator[tuple[int, int]]:
        """(context, slots) as far as the cache holds them."""
        room, filled = len(self._free_blocks) * self._block_size - 64 * self._num_slots - 4 * self._budget, 0
        previous = 0
        for context, share in _SHARE_OF_STAGES:
            slots = max(1, int(self._num_slots * share))
            filled += slots * (context - previous)
            if context > self._max_tokens or filled > room:
                if previous == 0:
                    raise ConfigError(
                        "the KV cache is too small to measure in; give it more with --kv-cache-memory",
                        param="kv_cache_memory",
                    )
                return
            yield context, slots
            previous = context

    def _start_all(self) -> None:
        random = np.random.default_rng(0)
        starts = tuple(
            SlotStart(
                slot=Slot(slot),
                request_id=RequestId(str(slot)),
                token_ids=tuple(random.integers(0, self._vocab, self._max_tokens).tolist()),
                num_prompt_tokens=self._max_tokens,
                sampling=TokenSampling(max_tokens=1, temperature=0.0),
            )
            for slot in range(self._num_slots)
        )
        self._run([], starts)

    def _fill(self, slots: int, context: int) -> list[Point]:
        """Computes all tokens before `context`, in chunks of many sizes, and times each."""
        sizes = [knot for knot in _KNOTS if 8 <= knot < self._budget] + [self._budget]
        found, number = [], 0
        for slot in range(slots):
            while (missing := context - self._known[slot]) > 0:
                count = min(missing, sizes[number % len(sizes)])
                number += 1
                found.append(self._repeated([(slot, count, count == missing)], 1))
        return found

    def _mixed(self, slots: int) -> list[Point]:
        """Decodes beside a chunk that fills the budget, and two chunks beside each other."""
        if slots < 2:
            return []
        rows = [(slot, 1, True) for slot in range(slots - 1)]
        found = [
            self._repeated([*rows[:share], (slots - 1, count, True)], 1)
            for share, count in (
                (1, self._budget - 1),
                (max(1, len(rows) // 4), self._budget // 2),
                (len(rows), 16),
                (len(rows), self._budget // 4),
            )
            if self._room(slots - 1, count)
        ]
        half = self._budget // 2
        if slots >= 4 and self._room(slots - 2, half) and self._room(slots - 1, half):
            found.append(self._repeated([(slots - 2, half, True), (slots - 1, half, True)], 1))
        return found

    def _room(self, slot: int, count: int) -> bool:
        return self._known[slot] + count <= self._max_tokens and count < len(self._free_blocks) * self._block_size

    def _repeated(self, rows: Sequence[tuple[int, int, bool]], repeats: int) -> Point:
        """The median of some runs, each of which goes on where the last ended."""
        shape = tuple((self._known[slot], count, sample) for slot, count, sample in rows)
        return Point(rows=shape, seconds=statistics.median(self._run(rows) for _ in range(repeats)))

    def _run(self, rows: Sequence[tuple[int, int, bool]], starts: tuple[SlotStart, ...] = ()) -> float:
        self._step += 1
        plan = StepPlan(
            step=self._step,
            releases=(),
            starts=starts,
            rows=tuple(self._row(*row) for row in rows),
            num_tokens=sum(count for _, count, _ in rows),
        )
        started = time.perf_counter()
        result = self._executor.submit(plan).sample()
        seconds = time.perf_counter() - started
        if errors := [row.error for row in result.rows if row.error]:
            raise ConfigError(f"the model cannot be measured: {errors[0]}")
        return seconds

    def _row(self, slot: int, count: int, sample: bool) -> RowPlan:
        start = self._known[slot]
        self._known[slot] += count
        more = -(-self._known[slot] // self._block_size) - self._blocks[slot]
        taken = tuple(self._free_blocks.pop() for _ in range(more))
        self._blocks[slot] += more
        return RowPlan(slot=Slot(slot), start=start, count=count, new_blocks=(taken,), sample=sample)


# --- fit ------------------------------------------------------------------------------------------------------------


def fit(points: Sequence[Point]) -> StepCosts:
    """The terms whose relative errors have the smallest sum of amounts. Raises ConfigError without points."""
    if not points:
        raise ConfigError("there is nothing to fit costs to")
    totals = {sum(count for _, count, _ in point.rows) for point in points}
    knots = [knot for knot in _KNOTS if min(totals) <= knot <= max(totals)]
    # A knot needs points on its piece; what was measured most is at powers of two and at the budget.
    knots = sorted({min(totals), *knots, max(totals)})
    knots = [knots[0]] + [right for left, right in pairwise(knots) if any(left < total <= right for total in totals)]
    design = np.array([_features(point, knots) for point in points])
    seconds = np.array([point.seconds for point in points])
    # Terms differ by many orders of magnitude: columns are scaled to 1 before they are fitted.
    relative = design / seconds[:, None]
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    terms = _nonnegative_least_deviations(relative / scale, np.ones(len(points))) / scale
    tokens, (sampled, decode_pairs, prefill_pairs) = terms[: len(knots)], terms[len(knots) :].tolist()
    return StepCosts(
        token_knots=tuple(knots),
        tokens=tuple(np.maximum.accumulate(tokens).tolist()),
        sampled=sampled,
        decode_pairs=decode_pairs,
        prefill_pairs=prefill_pairs,
    )


def _features(point: Point, knots: Sequence[int]) -> F64:
    """What the terms are multiplied with; `tokens` interpolates, so its features are the shares of two knots."""
    total = sum(count for _, count, _ in point.rows)
    hats = np.array([np.interp(total, knots, np.eye(len(knots))[index]) for index in range(len(knots))])
    sampled = sum(sample for *_, sample in point.rows)
    decode = sum(start + 1 for start, count, _ in point.rows if count == 1)
    prefill = sum(count * start + count * (count + 1) // 2 for start, count, _ in point.rows if count > 1)
    return np.concatenate((hats, [sampled, decode, prefill]))


def _nonnegative_least_deviations(a: F64, b: F64, rounds: int = 25) -> F64:
    """Minimizes the sum of |a x - b| over x >= 0, by least squares whose weights follow the residuals (Schlossmacher, 1973)."""
    x = _nonnegative_least_squares(a, b)
    for _ in range(rounds):
        weights = 1 / np.sqrt(np.maximum(np.abs(a @ x - b), 1e-3))
        x = _nonnegative_least_squares(a * weights[:, None], b * weights)
    return x


def _nonnegative_least_squares(a: F64, b: F64, rounds: int = 20_000) -> F64:
    """Minimizes |a x - b| over x >= 0 by cyclic coordinate descent, which converges for convex problems like this one."""
    gram, target = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    for _ in range(rounds):
        largest = 0.0
        for index in range(len(x)):
            if gram[index, index] > 0:
                new = max(0.0, x[index] + (target[index] - gram[index] @ x) / gram[index, index])
                largest = max(largest, abs(new - x[index]))
                x[index] = new
        if largest < 1e-9:
            break
    return x


def fit_serving(gaps: Sequence[tuple[int, float]]) -> ServingCosts:
    """What each step and each of its tokens adds, from (concurrency, seconds added to the gap between tokens)."""
    design = np.array([(1.0, count) for count, _ in gaps])
    step, token = _nonnegative_least_squares(design, np.array([seconds for _, seconds in gaps])).tolist()
    return ServingCosts(step=step, token=token)


def errors(costs: StepCosts, points: Sequence[Point]) -> dict[str, Any]:
    """How far the terms are from the points, in percent of the measured time: by kind of step, and of all."""
    kinds: dict[str, list[float]] = {}
    for point in points:
        counts = [count for _, count, _ in point.rows]
        kind = "decode" if max(counts) == 1 else "prompt" if len(counts) == 1 else "mixed"
        error = 100 * (costs.step_s(point.plan()) / point.seconds - 1)
        for name in (kind, "all"):
            kinds.setdefault(name, []).append(error)
    return {
        kind: {
            "points": len(values),
            "median_percent": float(np.median(np.abs(values))),
            "p90_percent": float(np.percentile(np.abs(values), 90)),
            "bias_percent": float(np.mean(values)),
        }
        for kind, values in kinds.items()
    }


# --- the scheduler's own time ---------------------------------------------------------------------------------------


def measure_scheduler() -> SchedulerCosts:
    """Times the real scheduler on steps that cost nothing, with 1 and with 64 rows."""
    one, many = scheduling_time(1), scheduling_time(64)
    row = max(0.0, (many - one) / 63)
    return SchedulerCosts(step=max(0.0, one - row), row=row)


def scheduling_time(num_rows: int, num_steps: int = 400) -> float:
    """Median seconds that the real scheduler takes for a step of `num_rows` decodes, on this machine."""
    layout = KVLayout(block_size=16, groups=(KVGroup(layers=(0,)),), num_blocks=(num_rows * 64,))
    scheduler = Scheduler(
        layout,
        SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=16 * num_rows),
        max_model_len=1024,
        least_part=None,  # after these short prompts it would be parts of steps that are timed
    )
    for number in range(num_rows):
        sampling = TokenSampling(max_tokens=num_steps + 8, temperature=0.0, ignore_eos=True)
        scheduler.add(
            GenerateRequest(request_id=RequestId(str(number)), prompt_token_ids=(number,) * 16, sampling=sampling)
        )
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        plan = scheduler.plan()
        planned_s = time.perf_counter() - started
        if plan is None:
            raise ConfigError("the scheduler had nothing to do")
        rows = tuple(RowResult(slot=row.slot, token_ids=(0,) if row.sample else ()) for row in plan.rows)
        result = StepResult(step=plan.step, rows=rows)
        started = time.perf_counter()
        scheduler.commit(plan, result)
        times.append(planned_s + time.perf_counter() - started)
    return statistics.median(times)


# --- files ----------------------------------------------------------------------------------------------------------


def result_of(costs: Costs, points: Sequence[Point], options: dict[str, Any]) -> dict[str, Any]:
    """The result file of a calibration, without what the server adds."""
    result = results.header("costs", options)
    return result | {
        "model": costs.model.name,
        "costs": msgspec.to_builtins(costs),
        "fit": errors(costs.step, points),
        "points": [_compact(point) for point in points],
    }


def read_costs(path: Path | None, model: str, folder: Path = results.RESULTS_FOLDER) -> tuple[Path, Costs]:
    """The costs of a file, else those measured last for a model, by the results in a folder, and the file.

    Raises ConfigError when there are none, or the file holds something else.
    """
    if path is None:
        found = [file for file in sorted(folder.glob("*-costs.json")) if _read(file).get("model") == model]
        if not found:
            raise ConfigError(
                f"no costs of {model} in {folder}: measure them with octavo bench costs --model {model}, or name a file with --costs",
                param="costs",
            )
        path = found[-1]
    try:
        return path, msgspec.convert(_read(path).get("costs"), Costs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds no costs of this version: {error}", param="costs") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="costs") from None


def _compact(point: Point) -> dict[str, Any]:
    """Runs of equal rows are counted, so that a file stays readable."""
    rows: list[list[Any]] = []
    for start, count, sample in point.rows:
        if rows and rows[-1][1:] == [start, count, sample]:
            rows[-1][0] += 1
        else:
            rows.append([1, start, count, sample])
    return {"rows": rows, "seconds": point.seconds}
