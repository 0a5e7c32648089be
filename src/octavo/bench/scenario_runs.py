"""Runs scenarios: on real servers that it starts and ends, or by the simulator. Decides nothing about what is asked or claimed."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench import results
from octavo.bench.figures import Outcome, by_kind, figures, quantiles
from octavo.bench.http.client import Target, first_model
from octavo.bench.http.load import run_load
from octavo.bench.http.server import command_line, serving
from octavo.bench.local.costs import Costs
from octavo.bench.local.simulate import simulate
from octavo.bench.local.synthesize import Shape, synthesize
from octavo.bench.scenarios import LONG, Run, Scenario
from octavo.config import Config, ModelConfig
from octavo.errors import ConfigError
from octavo.loaders.catalogue import cache_folder

Progress = Callable[[str, int, int], None]
"""Called with (what comes next, runs done, runs in all)."""

_LONG_SHAPE = Shape(layers=8, context=32_768)
_LONG_FILE = "bench-long-context-1.gguf"


def model_file(name: str) -> str:
    """What to load for a scenario's model: made-up ones are made, in the cache of models, unless they are there."""
    if name != LONG:
        return name
    path = cache_folder() / _LONG_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.gguf")
        synthesize(part, _LONG_SHAPE, like="smollm2-135m")
        part.rename(path)
    return str(path)


def run_scenario(
    scenario: Scenario,
    *,
    model: str | None = None,
    rounds: int = 1,
    seed: int = 1,
    costs: tuple[Path, Costs] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The result as JSON-ready values: figures of each run, medians over rounds, and what became of the claims.

    With `costs` (and the file they are from) nothing is computed: the simulator runs it. Raises ConfigError.
    """
    if rounds < 1:
        raise ConfigError("--rounds must be at least 1", param="rounds")
    report = progress or (lambda *_: None)
    name = model or scenario.model
    options = {"scenario": scenario.name, "rounds": rounds, "seed": seed, "model": name}
    result = results.header("scenario", options) | {
        "scenario": scenario.name,
        "variant": scenario.name if costs is None else f"{scenario.name}-simulated",
        "description": scenario.description,
        "model": name,
        "by": "server" if costs is None else f"simulation with {costs[0].name}",
    }
    measured: dict[str, list[dict[str, Any]]] = {}
    total = rounds * len(scenario.runs(seed))
    path = model_file(name) if costs is None else ""
    for number in range(rounds):
        for run in scenario.runs(seed + number):
            report(f"{run.label}, round {number + 1}", sum(map(len, measured.values())), total)
            found = _serve(run, path) if costs is None else _simulate(run, costs[1])
            if found["failed"]:
                raise ConfigError(
                    f"{scenario.name}, {run.label}: {found['failed']} requests failed: {found['errors'][0]}"
                )
            measured.setdefault(run.label, []).append(found)
    report("done", total, total)
    runs = {label: _medians(rounds_of) for label, rounds_of in measured.items()}
    result["runs"] = runs
    result["claims"] = [
        {
            "text": claim.text,
            "value": (value := claim.value(runs)),
            "unit": claim.unit,
            "at_most": claim.at_most,
            "at_least": claim.at_least,
            "holds": claim.holds(value),
        }
        for claim in scenario.claims
    ]
    result["load_after"] = results.load_average()
    return result


def _serve(run: Run, model: str) -> dict[str, Any]:
    config = _with_model(run.config, model)
    keys = {tenant: key for tenant, _, key in (pair.partition(":") for pair in config.server.api_key)}
    with serving(command_line(config)) as url:
        if keys:
            keys[""] = next(iter(keys.values()))  # any of them may list models and read metrics
        target = Target(base_url=url, model=asyncio.run(first_model(url, keys.get(""))), keys=keys)
        found, outcomes = asyncio.run(run_load(run.traffic, target, {}))
    return {"engine": found["engine"]} | _figures(outcomes)


def _simulate(run: Run, costs: Costs) -> dict[str, Any]:
    done = simulate(run.traffic, costs, run.config)
    return {"engine": done.engine} | _figures(done.outcomes)


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    kinds = by_kind(outcomes)
    for kind, found in kinds.items():
        found["quantiles"] = quantiles([outcome for outcome in outcomes if outcome.kind == kind])
    return figures(outcomes) | {"quantiles": quantiles(outcomes), "kinds": kinds}


def _with_model(config: Config, model: str) -> Config:
    return msgspec.structs.replace(config, model=ModelConfig(model=model, served_model_name=("m",)))


def _medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of all numbers, at whatever depth; what is no number is that of the first round."""
    if len(rounds) == 1:
        return dict(rounds[0])
    merged: dict[str, Any] = {}
    for key, first in rounds[0].items():
        values = [found[key] for found in rounds if key in found]
        if isinstance(first, Mapping):
            merged[key] = _medians(values)
        elif isinstance(first, (int, float)):
            merged[key] = statistics.median(values)
        elif isinstance(first, list) and all(isinstance(value, (int, float)) for value in first):
            merged[key] = [statistics.median(column) for column in zip(*values, strict=True)]
        else:
            merged[key] = first
    numbers = [{key: value for key, value in found.items() if isinstance(value, (int, float))} for found in rounds]
    return merged | {"rounds": numbers} if any(numbers) else merged
