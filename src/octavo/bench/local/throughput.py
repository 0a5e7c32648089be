"""Offline throughput: the workloads of `octavo.bench.workloads` through `LLM`, without a server.

A round runs every workload once, with an engine of its own and prompts of the round's own seed; results are medians over rounds. All
requests of a workload are handed over at once and the engine runs as many at a time as the workload says (continuous batching). Two
older ways can be measured beside it: one request at a time, and static batches, of which the next begins when the last has ended.
Tokens are counted as asked for, as end-of-sequence is ignored.

Times are the engine's: a request's time to first token counts from when it got its place, as a client's would who sends the next
request when one has ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.bench import results
from octavo.bench.figures import percentile
from octavo.bench.workloads import WARM_UP, WARM_UP_SEED, WORKLOADS, Workload
from octavo.errors import ConfigError
from octavo.frontend.llm import LLM
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.params import SamplingParams

Progress = Callable[[str, int, int], None]
"""Called with (what comes next, runs done, runs in all)."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `batch`: None for continuous batching, 1 for one request at a time, else the size of static batches.

    `engine`: further options of `LLM`. `seed`: of the first round; the others follow.
    """

    model: str = "smollm2-135m"
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    rounds: int = 3
    seed: int = 1
    batch: int | None = None
    engine: Mapping[str, Any] = {}


def run_throughput(
    options: Options, progress: Progress | None = None, workloads: Mapping[str, Workload] = WORKLOADS
) -> dict[str, Any]:
    """Measures and returns the result as JSON-ready values. Raises ConfigError, and what `LLM` raises."""
    if unknown := [name for name in options.workloads if name not in workloads]:
        raise ConfigError(f"no workload {unknown[0]!r}: there are {', '.join(workloads)} and all", param="workload")
    if options.rounds < 1:
        raise ConfigError("--rounds must be at least 1", param="rounds")
    if options.batch is not None and options.batch < 1:
        raise ConfigError("static batches have at least 1 request", param="static_batches")
    report = progress or (lambda *_: None)
    result = results.header("throughput", msgspec.to_builtins(options))
    result |= {"model": options.model, "batching": _batching(options.batch)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in options.workloads}
    total = options.rounds * len(options.workloads)
    for number in range(options.rounds):
        for index, name in enumerate(options.workloads):
            report(f"{name}, round {number + 1}", number * len(options.workloads) + index, total)
            rounds[name].append(run_workload(workloads[name], options, seed=options.seed + number))
    report("done", total, total)
    result["results"] = [
        {"workload": name, **_medians(measured), "rounds": measured} for name, measured in rounds.items()
    ]
    result["load_after"] = results.load_average()
    return result


def run_workload(workload: Workload, options: Options, *, seed: int) -> dict[str, float]:
    """One round of one workload. Times in milliseconds, except where the name says otherwise."""
    prompts, at_once = workload.prompts(seed), options.batch or workload.concurrency
    started = time.perf_counter()
    engine = {"enable_prefix_caching": workload.shared_words > 0, "max_num_seqs": at_once, **options.engine}
    with LLM(options.model, **engine) as llm:
        load_s = time.perf_counter() - started
        for prompt in WARM_UP.prompts(WARM_UP_SEED):
            llm.generate(prompt, _greedy(WARM_UP), use_tqdm=False)
        outputs: list[RequestOutput] = []
        size = len(prompts) if options.batch is None else options.batch
        started = time.perf_counter()
        for begin in range(0, len(prompts), size):
            outputs += llm.generate(prompts[begin : begin + size], _greedy(workload), use_tqdm=False)
        wall_s = time.perf_counter() - started
    return _figures(outputs, wall_s) | {"load_s": load_s}


def _greedy(workload: Workload) -> SamplingParams:
    return SamplingParams(max_tokens=workload.output, temperature=0.0, ignore_eos=True)


def _figures(outputs: Sequence[RequestOutput], wall_s: float) -> dict[str, float]:
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    ttft_ms, tpot_ms, e2e_ms = [], [], []
    for output in outputs:
        times = output.metrics
        assert times is not None
        assert times.scheduled_s is not None
        assert times.first_token_s is not None
        ttft_ms.append((times.first_token_s - times.scheduled_s) * 1e3)
        e2e_ms.append((times.finished_s - times.scheduled_s) * 1e3)
        if times.num_generated_tokens > 1:
            tpot_ms.append((times.finished_s - times.first_token_s) * 1e3 / (times.num_generated_tokens - 1))
    figures = {
        "out_tok_s": generated / wall_s,
        "req_s": len(outputs) / wall_s,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs) / len(outputs),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs) / len(outputs),
        "wall_s": wall_s,
    }
    for name, values in (("ttft", ttft_ms), ("tpot", tpot_ms), ("e2e", e2e_ms)):
        if values:
            figures |= {f"{name}_p{percent}_ms": percentile(values, percent) for percent in (50, 95)}
    return figures


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _batching(batch: int | None) -> str:
    if batch is None:
        return "continuous"
    return "one at a time" if batch == 1 else f"static batches of {batch}"
