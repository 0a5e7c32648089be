"""Scenarios: what they ask is what they say, the simulator runs all of them, and a real server runs one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.bench import results
from octavo.bench.local.costs import StepCosts
from octavo.bench.local.synthesize import Shape, synthesize
from octavo.bench.report import write_report
from octavo.bench.scenario_runs import run_scenario
from octavo.bench.scenarios import FAIRNESS, SCENARIOS, Claim
from octavo.cli.main import main
from octavo.errors import ConfigError

from .test_simulate import COSTS

# 5 ms per step and 1 ms per token: a laptop with a small model.
STEP = StepCosts(token_knots=(0, 1000), tokens=(0.005, 1.005), sampled=0.0, decode_pairs=0.0, prefill_pairs=0.0)
ROOMY = msgspec.structs.replace(COSTS, step=STEP, model=msgspec.structs.replace(COSTS.model, max_context=32_768))


def _simulated(name: str, **options: Any) -> dict[str, Any]:
    return run_scenario(SCENARIOS[name], costs=(Path("costs.json"), ROOMY), **options)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_all_are_simulated(name: str) -> None:
    result = _simulated(name)
    assert all(math.isfinite(claim["value"]) for claim in result["claims"])
    if name in ("cache", "warm", "sharing"):  # the others depend on what a machine's steps cost
        assert [claim for claim in result["claims"] if claim["holds"] is False] == []
    assert json.loads(json.dumps(result, allow_nan=False))["by"] == "simulation with costs.json"
    assert all(run["failed"] == 0 and run["completed"] > 0 for run in result["runs"].values())


def test_fairness_is_the_policys() -> None:
    runs = _simulated("fairness")["runs"]
    fair, fcfs = runs["A and B, fair"]["kinds"]["B"], runs["A and B, fcfs"]["kinds"]["B"]
    assert fcfs["p95_ttft_ms"] > 3 * fair["p95_ttft_ms"]


def test_rounds_are_merged_by_medians() -> None:
    result = _simulated("short", rounds=3)
    kinds = result["runs"]["beside 48 answers"]["kinds"]
    assert set(kinds) == {"streams", "short"}
    run = kinds["short"]
    rounds = sorted(one["p95_ttft_ms"] for one in run["rounds"])
    assert len(rounds) == 3 and rounds[0] < rounds[2]  # seeds differ
    assert run["p95_ttft_ms"] == rounds[1]
    with pytest.raises(ConfigError, match="rounds"):
        _simulated("short", rounds=0)


def test_claims() -> None:
    def value(runs: Any) -> float:
        return 1.0

    assert Claim(text="", value=value, at_most=1).holds(1.0) is True
    assert Claim(text="", value=value, at_least=1).holds(0.9) is False
    assert Claim(text="", value=value).holds(5.0) is None


def test_failed_requests_are_no_result() -> None:
    small = msgspec.structs.replace(COSTS, model=msgspec.structs.replace(COSTS.model, max_context=90))
    with pytest.raises(ConfigError, match="requests failed"):
        run_scenario(FAIRNESS, costs=(Path("c"), small))


def test_real_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tiny.gguf"
    synthesize(
        model,
        Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32, ffn=32, context=4096),
        like="smollm2-135m",
    )
    path, plot = tmp_path / "r.json", tmp_path / "p.svg"
    arguments = ["bench", "scenario", "warm", "--model", str(model), "--json", str(path), "--plot", str(plot)]
    assert main(arguments) in (0, 1)  # a model this small spends its time on other things than the prompt
    out = capsys.readouterr().out
    assert "median TTFT, warm against cold" in out
    result = json.loads(path.read_text())
    kinds = result["runs"]["cold, then warm"]["kinds"]
    assert kinds["cold"]["total_cached_tokens"] == 0
    assert kinds["warm"]["cached_percent"] == pytest.approx(100 * 2000 / 2030)
    assert result["by"] == "server"
    assert plot.read_bytes().startswith(b"<?xml")
    assert main([*arguments, "--beside", str(tmp_path / "none.json")]) == 2
    assert main(["bench", "scenario", "short", "--beside", str(path), "--no-result"]) == 2
    assert main(["bench", "scenario", "short", "--plot", "x.gif", "--no-result"]) == 2


def test_report_has_scenarios_loads_and_costs(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert results.write(_simulated("short"), folder=folder).name.endswith("-short-simulated-scenario.json")
    costs = {"costs": msgspec.to_builtins(COSTS), "fit": {}, "model": "m", "load_after": 0.1}
    costs_path = results.write(results.header("costs", {}) | costs, folder=folder)
    load = tmp_path / "results/2026-12-01-load.json"
    arguments = ["bench", "simulate", "--costs", str(costs_path), "--dataset-name", "prefix", "--json", str(load)]
    assert main(arguments) == 0
    page = write_report(folder, tmp_path).read_text()
    assert "## Scenarios" in page and "p95 TTFT of short prompts" in page
    assert "## Loads" in page and "| prefix" in page
    assert "each row that samples" in page
    assert "not quiet" not in page.split("## Costs")[0]
    assert len(list((tmp_path / "plots").iterdir())) == 1
