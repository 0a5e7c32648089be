"""The simulator: virtual time adds up, clients behave, and the scheduler and cache are the real ones."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import msgspec
import pytest

from octavo.bench.local.costs import Costs, ModelFacts, SchedulerCosts, ServingCosts, StepCosts
from octavo.bench.local.simulate import simulate
from octavo.bench.traffic import Job, Traffic, race, random_lengths
from octavo.cli.main import main
from octavo.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from octavo.contracts import KVGroup
from octavo.errors import ConfigError

STEP_S, SERVED_S = 0.01, 0.001
GROUP = KVGroup(layers=(0,), bytes_per_token=1024)
COSTS = Costs(
    model=ModelFacts(
        name="made-up", max_context=4096, groups=(GROUP,), weight_bytes=1 << 20, free_bytes=1 << 32, vocab_size=100
    ),
    # A step of any size takes 10 ms, and 1 ms for each 100 tokens.
    step=StepCosts(
        token_knots=(0, 1000), tokens=(STEP_S, STEP_S + 0.01), sampled=0.0, decode_pairs=0.0, prefill_pairs=0.0
    ),
)


def _traffic(*jobs: Job, max_concurrency: int | None = None) -> Traffic:
    return Traffic(name="t", jobs=jobs, max_concurrency=max_concurrency)


def _job(words: int, output: int = 1, name: str = "", **fields: object) -> Job:
    return msgspec.convert({"prompt": [[name or f"p{random.random()}", words]], "output_tokens": output, **fields}, Job)


def test_times_of_one_request_add_up() -> None:
    costs = msgspec.structs.replace(
        COSTS,
        scheduler=SchedulerCosts(step=0.002, row=0.001),
        serving=ServingCosts(step=0.003, token=0.0005, request=0.05),
    )
    done = simulate(_traffic(_job(1000, 3, at_s=2.0)), costs, Config())
    (outcome,) = done.outcomes
    around = 0.002 + 0.001 + 0.003
    first = [0.01 + 0.00512 + around, 0.01 + 0.00488 + around + 0.0005]  # two chunks, of which the second samples
    assert outcome.sent_s == 2.0
    assert outcome.ttft_ms == pytest.approx(50 + 1e3 * sum(first))
    assert list(outcome.gaps_s) == pytest.approx([0.01 + 1e-5 + around + 0.0005] * 2)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (1000, 3, 0)
    assert done.engine["steps"] == 4


def test_cost_terms() -> None:
    terms = StepCosts(token_knots=(1, 10), tokens=(1.0, 10.0), sampled=100.0, decode_pairs=1000.0, prefill_pairs=1e-3)
    from octavo.contracts import RowPlan, Slot

    def row(start: int, count: int, sample: bool) -> RowPlan:
        return RowPlan(slot=Slot(0), start=start, count=count, new_blocks=(), sample=sample)

    assert terms.step_s([row(4, 1, True)]) == pytest.approx(1 + 100 + 5000)
    assert terms.step_s([row(4, 1, True), row(2, 4, False)]) == pytest.approx(5 + 100 + 5000 + (3 + 4 + 5 + 6) / 1e3)
    assert terms.step_s([row(0, 19, False)]) == pytest.approx(19 + 190 / 1e3)  # goes on beyond the last knot


def test_concurrency_is_the_clients() -> None:
    jobs = [_job(10, 5) for _ in range(12)]
    done = simulate(_traffic(*jobs, max_concurrency=3), COSTS, Config())
    found = done.figures()
    assert found["max_concurrent_requests"] == 3
    assert found["completed"] == 12
    assert done.engine["waiting_max"] == 0
    open_loop = simulate(_traffic(*jobs), COSTS, Config(scheduler=SchedulerConfig(max_num_seqs=3)))
    assert open_loop.figures()["max_concurrent_requests"] == 12
    assert open_loop.engine["waiting_max"] > 0


def test_sessions_wait_and_think() -> None:
    first, second = _job(10, 4, session="s"), _job(10, 2, session="s", think_s=1.5)
    done = simulate(_traffic(first, second, _job(10, 1, at_s=60.0)), COSTS, Config())
    assert done.outcomes[1].sent_s == pytest.approx(done.outcomes[0].last_s + 1.5)
    assert done.outcomes[2].sent_s == 60.0
    assert done.outcomes[2].ttft_ms == pytest.approx(10.1)  # nobody else is there


def test_prefixes_are_cached_by_the_real_cache() -> None:
    jobs = [_job(330, 4, name="same"), _job(330, 4, name="same")]
    warm = simulate(_traffic(*jobs, max_concurrency=1), COSTS, Config())
    first, second = (outcome.cached_tokens for outcome in warm.outcomes)
    assert first == 0
    assert 320 <= second < 330
    assert warm.outcomes[1].ttft_ms < warm.outcomes[0].ttft_ms
    off = Config(cache=CacheConfig(enable_prefix_caching=False))
    assert simulate(_traffic(*jobs, max_concurrency=1), COSTS, off).figures()["total_cached_tokens"] == 0


def test_a_short_cache_preempts() -> None:
    tight = Config(cache=CacheConfig(kv_cache_memory="1M"), model=ModelConfig(max_model_len=1024))
    done = simulate(_traffic(*(_job(200, 300) for _ in range(6))), COSTS, tight)
    assert done.engine["preemptions"] > 0
    assert done.engine["kv_usage_max"] > 0.9
    assert done.figures()["total_output_tokens"] == 6 * 300


def test_equal_input_gives_equal_results() -> None:
    runs = [simulate(race("c16", 1), COSTS, Config()).figures() for _ in range(2)]
    for run in runs:
        run["engine"] = {key: value for key, value in run["engine"].items() if "wall" not in key}
    assert runs[0] == runs[1]


def test_thousands_of_waiting_requests_are_quick() -> None:
    started = time.perf_counter()
    done = simulate(random_lengths(10_000, input_len=20, output_len=2), COSTS, Config())
    assert done.figures()["completed"] == 10_000
    assert done.engine["waiting_max"] > 9_000
    assert time.perf_counter() - started < 30  # about 1 s on a quiet machine


def test_refusals_and_what_never_fits() -> None:
    done = simulate(_traffic(_job(5000, 1), _job(5, 1)), COSTS, Config())
    assert done.outcomes[0].error is not None and "no room" in done.outcomes[0].error
    assert done.outcomes[1].error is None
    with pytest.raises(ConfigError, match="literal text"):
        simulate(_traffic(Job(text="hello", output_tokens=1)), COSTS, Config())
    with pytest.raises(ConfigError, match="--max-model-len is 99999"):
        simulate(_traffic(_job(5)), COSTS, Config(model=ModelConfig(max_model_len=99_999)))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "simulate", "--model", "made-up", "--dataset-name", "prefix", "--json", "r.json"]
    assert main(arguments) == 2
    assert "octavo bench costs --model made-up" in capsys.readouterr().err
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    (results / "2026-12-01-x-costs.json").write_text(
        json.dumps({"kind": "costs", "model": "made-up", "costs": msgspec.to_builtins(COSTS)})
    )
    assert main([*arguments, "--max-num-seqs", "2", "--goodput", "ttft:1e6", "--save-trace", "t.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "Simulated Serving Result" in out and "P95 TTFT (ms):" in out and "Preemptions:" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["kind"], result["completed"], result["total_cached_tokens"] > 0) == ("simulate", 24, True)
    assert result["options"]["scheduler"]["max_num_seqs"] == 2
    assert result["options"]["traffic"] == {
        "dataset_name": "prefix", "num_prompts": 1000, "seed": 1, "request_rate": "inf", "burstiness": 1.0, "goodput": ["ttft:1e6"],
    }  # fmt: skip
    again = ["bench", "simulate", "--model", "made-up", "--dataset-name", "trace", "--dataset-path", "t.jsonl"]
    assert main([*again, "--max-num-seqs", "2", "--max-concurrency", "4", "--json", "r2.json"]) == 0
    second = json.loads((tmp_path / "r2.json").read_text())
    assert second["mean_ttft_ms"] == result["mean_ttft_ms"]
    (results / "2026-12-02-x-costs.json").write_text('{"kind": "costs", "model": "made-up", "costs": {}}')
    assert main(arguments) == 2
    assert "no costs of this version" in capsys.readouterr().err
