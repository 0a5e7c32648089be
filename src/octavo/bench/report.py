"""The report: what the result files of a folder say, as one page of tables with plots. Measures nothing.

Soak results and other kinds that it does not know are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from octavo.bench.load_report import costs_table, load_table, scenario_report
from octavo.bench.plots import plot_kernels, plot_race, plot_scenario, plot_throughput, require_matplotlib
from octavo.bench.results import QUIET_LOAD
from octavo.bench.tables import duration, table
from octavo.errors import ConfigError

Result = Mapping[str, Any]
_STEPS = (
    "Where the time of a step goes: percent of the step, and in brackets how much of its roofline each part reaches."
)
_THROUGHPUT_COLUMNS = {
    "out_tok_s": "tok/s",
    "req_s": "req/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "p95",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p95_ms": "p95",
}


def write_report(folder: Path, out: Path, image: Literal["svg", "png"] = "svg") -> Path:
    """Writes `out`/report.md and `out`/plots from the results in `folder`, and returns the page's path.

    Raises ConfigError when matplotlib is missing, the folder holds no result of a known kind, or something cannot be read or written.
    """
    require_matplotlib()
    results = read_results(folder)
    kernels = {path: result for path, result in results.items() if result["kind"] == "kernels"}
    throughput = {path: result for path, result in results.items() if result["kind"] == "throughput"}
    races = {path: result for path, result in results.items() if result["kind"] == "race"}
    served = {path: result for path, result in results.items() if result["kind"] == "server"}
    scenarios = {path: result for path, result in results.items() if result["kind"] == "scenario"}
    loads = {path: result for path, result in results.items() if result["kind"] in ("serve", "simulate")}
    costs = {path: result for path, result in results.items() if result["kind"] == "costs"}
    if not (kernels or throughput or races or served or scenarios or loads or costs):
        raise ConfigError(f"{folder} holds no results of octavo bench, scripts/race.py or scripts/measure_server.py")
    plots = out / "plots"
    page = ["# Measurements", "", "Made by `octavo bench report` from the files in `results`.", ""]
    try:
        plots.mkdir(parents=True, exist_ok=True)
        if races:
            page += ["## Races", ""]
        for path, result in races.items():
            plot_race(result, plots / f"{path.stem}.{image}")
            page += [*_heading(path, result), f"![race](plots/{path.stem}.{image})", "", *race_table(result), ""]
        if served:
            page += ["## Serving", ""]
        for path, result in served.items():
            page += [*_heading(path, result), *server_table(result), ""]
        if scenarios:
            page += ["## Scenarios", ""]
        for path, result in scenarios.items():
            plot_scenario([result], plots / f"{path.stem}.{image}")
            page += [*_heading(path, result), f"{result['description']}, by {result['by']}.", ""]
            page += [f"![{result['scenario']}](plots/{path.stem}.{image})", "", *scenario_report(result), ""]
        if loads:
            page += ["## Loads", ""]
        for path, result in loads.items():
            kinds = result["kinds"] or {result["workload"]: result}
            page += [*_heading(path, result), *load_table(kinds), ""]
        if costs:
            page += ["## Costs of a step, for the simulator", ""]
        for path, result in costs.items():
            page += [*_heading(path, result), *costs_table(result), ""]
        if throughput:
            plot_throughput(list(throughput.values()), plots / f"throughput.{image}")
            page += ["## Offline throughput", "", f"![throughput](plots/throughput.{image})", ""]
            for path, result in throughput.items():
                page += [*_heading(path, result), *throughput_table(result), ""]
        if kernels:
            page += ["## Kernels", ""]
        for path, result in kernels.items():
            plot_kernels(result, plots / f"{path.stem}.{image}")
            page += [*_heading(path, result), f"![kernels](plots/{path.stem}.{image})", ""]
            page += [*ceilings_table(result), "", *kernels_table(result), ""]
            page += [_STEPS, "", *steps_table(result), ""]
        report = out / "report.md"
        report.write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from None
    return report


def read_results(folder: Path) -> dict[Path, Result]:
    """The results of a folder by file, in the order of their names. Raises ConfigError for a file that cannot be read."""
    results: dict[Path, Result] = {}
    for path in sorted(folder.glob("*.json")):
        result = read_result(path)
        if isinstance(result, dict) and "kind" in result:
            results[path] = result
    return results


def read_result(path: Path) -> Any:
    """What a result file holds. Raises ConfigError when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def kernels_table(result: Result) -> list[str]:
    """Operations, as lines of Markdown. The time is the median."""
    rows = [
        (
            line["op"],
            line["shape"],
            line["format"],
            line["rows"],
            line["context"] or "",
            duration(line["median_s"]),
            duration(line["best_s"]),
            f"{line['gb_s']:.1f}" if "gb_s" in line else "",
            f"{line['gop_s']:.0f}" if line.get("operations") else "",
            f"{line['roofline_percent']:.0f} %" if "roofline_percent" in line else "",
            line.get("bound", ""),
        )
        for line in result["results"]
    ]
    columns = (
        "operation",
        "shape",
        "format",
        "rows",
        "context",
        "time",
        "best",
        "GB/s",
        "GOP/s",
        "of roofline",
        "bound",
    )
    return table(columns, rows, text_columns=3)


def steps_table(result: Result) -> list[str]:
    """Where the time of a step goes, as lines of Markdown: percent of the step, and of its own roofline in brackets."""
    steps = [line for line in result["results"] if "phases" in line]
    kinds = list(dict.fromkeys(kind for line in steps for kind in line["phases"]))
    rows = []
    for line in steps:
        total_s = sum(phase["median_s"] for phase in line["phases"].values())
        cells = []
        for kind in kinds:
            phase = line["phases"].get(kind)
            cell = "" if phase is None else f"{100 * phase['median_s'] / total_s:.0f} %"
            if phase is not None and phase["roofline_s"]:
                cell += f" ({100 * phase['roofline_s'] / phase['median_s']:.0f})"
            cells.append(cell)
        rows.append((line["op"], line["format"], line["rows"], line["context"], duration(line["median_s"]), *cells))
    return table(("step", "format", "rows", "context", "time", *kinds), rows, text_columns=2)


def ceilings_table(result: Result) -> list[str]:
    """What the machine gave, as lines of Markdown."""
    rows = [
        (_readable(name), f"{values['best']:.1f}", f"{values['median']:.1f}")
        for name, values in result["ceilings"].items()
    ]
    return table(("ceiling", "best", "median"), rows, text_columns=1)


def throughput_table(result: Result) -> list[str]:
    """Workloads, as lines of Markdown."""
    rows = [
        (line["workload"], *(f"{line[key]:.4g}" if key in line else "" for key in _THROUGHPUT_COLUMNS))
        for line in result["results"]
    ]
    return table(("workload", *_THROUGHPUT_COLUMNS.values()), rows, text_columns=1)


def race_table(result: Result) -> list[str]:
    """Medians of each workload and contestant, as lines of Markdown, and how many times faster octavo is: by the time to first token in
    `prompt`, by tokens per second elsewhere. Contestants without a server are compared with octavo without one."""
    rows = []
    for work, contestants in result["results"].items():
        for name, figures in contestants.items():
            ours = contestants.get("offline-octavo" if name.startswith("offline-") else "octavo")
            tokens_s, ttft_ms = figures["out_tok_s"], figures.get("ttft_p50")
            ratio = None
            if ours is not None and name not in ("octavo", "offline-octavo"):
                ratio = ttft_ms / ours["ttft_p50"] if work == "prompt" else ours["out_tok_s"] / tokens_s
            rows.append(
                (
                    work,
                    name,
                    f"{tokens_s:.1f}" if tokens_s else "",
                    f"{ttft_ms:.0f}" if ttft_ms else "",
                    f"{ratio:.2f}" if ratio else "",
                )
            )
    return table(("workload", "engine", "tok/s", "TTFT p50 ms", "octavo is, times"), rows, text_columns=2)


def server_table(result: Result) -> list[str]:
    """Medians of what serving costs, as lines of Markdown."""
    rows = [
        (part, name, ", ".join(f"{_readable(key)} {value:.4g}" for key, value in figures.items()))
        for part, variants in result["results"].items()
        for name, figures in variants.items()
    ]
    return table(("part", "variant", "medians"), rows, text_columns=3)


def _heading(path: Path, result: Result) -> list[str]:
    loads = result["load_before"], result["load_after"]
    measured = result["kind"] != "simulate" and result.get("by", "server") == "server"
    noisy = " **The machine was not quiet.**" if measured and loads[0] > QUIET_LOAD else ""
    facts = [f"`{path.name}`: {result['machine']['cpu']}, {result['machine']['cpus']} CPUs, commit {result['commit']}"]
    facts += [f"model {result['model']}"]
    facts += [f"{key} {result[key]}" for key in ("isa", "threads", "batching") if key in result]
    return [
        f"### {result['date']}",
        "",
        f"{', '.join(facts)}; load average {loads[0]:.2f} before, {loads[1]:.2f} after.{noisy}",
        "",
    ]


def _readable(name: str) -> str:
    """`memory_huge_pages_one_thread_gb_s` -> `memory huge pages one thread, GB/s`."""
    for suffix, unit in (("_gb_s", "GB/s"), ("_gop_s", "GOP/s"), ("_ns", "ns"), ("_us", "us")):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')}, {unit}"
    return name
