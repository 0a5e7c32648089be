"""Plots of result files, drawn with matplotlib (the `bench` extra). Knows results, not where they come from or go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.figures import QUANTILES, Outcome
from octavo.errors import ConfigError

Result = Mapping[str, Any]
_FIGURES = ("out_tok_s", "output tokens per second"), ("ttft_p50_ms", "median time to first token, ms")


def require_matplotlib() -> None:
    """Raises ConfigError that says how to get it."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'octavo[bench]'") from None


def plot_kernels(result: Result, path: Path) -> None:
    """Linears of each format over the number of rows against both rooflines, and attention beside its own."""
    figure, (left, right) = _figure(2)
    linears: dict[str, list[Result]] = {}
    for line in result["results"]:
        if line["op"] == "linear gate+up":
            linears.setdefault(line["format"], []).append(line)
    for form, lines in linears.items():
        rows = [line["rows"] for line in lines]
        drawn = left.plot(rows, [line["gop_s"] for line in lines], marker="o", label=form)
        roofline = [line["operations"] / line["roofline_s"] / 1e9 for line in lines]
        left.plot(rows, roofline, linestyle="--", color=drawn[0].get_color())
    left.set(xscale="log", yscale="log", xlabel="rows", ylabel="GOP/s", title="gate and up; dashed: roofline")
    left.set_xscale("log", base=2)
    if linears:
        left.legend()
    decode = [line for line in result["results"] if line["op"].startswith(("attention", "step"))]
    names = [f"{line['op']}, {line['format']}, {line['rows']} x {line['context']}" for line in decode]
    right.barh(names, [line["roofline_percent"] for line in decode])
    right.axvline(100, color="black", linewidth=0.8)
    right.set(xlabel="percent of roofline (rows x context)", title="attention and whole steps")
    right.invert_yaxis()
    _save(figure, path, result)


def plot_throughput(results: Sequence[Result], path: Path) -> None:
    """All throughput results side by side, workload by workload."""
    figure, axes = _figure(len(_FIGURES))
    workloads = list(dict.fromkeys(line["workload"] for result in results for line in result["results"]))
    width = 0.8 / len(results)
    for axis, (key, title) in zip(axes, _FIGURES, strict=True):
        for number, result in enumerate(results):
            lines = {line["workload"]: line for line in result["results"]}
            places = [index for index, name in enumerate(workloads) if key in lines.get(name, {})]
            bars = axis.bar(
                [place + number * width for place in places],
                [lines[workloads[place]][key] for place in places],
                width=width,
                label=f"{Path(result['model']).stem}, {result['batching']}, {result['commit']}",
            )
            axis.bar_label(bars, fmt="{:.3g}", fontsize="small")
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(workloads))], workloads)
        axis.set(title=title)
    axes[0].legend()
    _save(figure, path, results[-1])


def plot_race(result: Result, path: Path) -> None:
    """Every engine, workload by workload, servers left and engines without a server right; relative to octavo, so that one axis holds
    all workloads. Speeds: in `prompt` the inverse of the time to first token."""
    figure, axes = _figure(2)
    medians = result["results"]
    for axis, reference, title in (
        (axes[0], "octavo", "through the server"),
        (axes[1], "offline-octavo", "without a server"),
    ):
        offline = reference.startswith("offline-")
        names = dict.fromkeys(
            name for of_work in medians.values() for name in of_work if name.startswith("offline-") == offline
        )
        works = [work for work, of_work in medians.items() if reference in of_work]
        width = 0.8 / max(len(names), 1)
        for number, name in enumerate(names):
            raced = [(place, medians[work]) for place, work in enumerate(works) if name in medians[work]]
            bars = axis.bar(
                [place + number * width for place, _ in raced],
                [_speed(works[place], of[name]) / _speed(works[place], of[reference]) for place, of in raced],
                width=width,
                label=name.removeprefix("offline-"),
            )
            axis.bar_label(bars, fmt="{:.2g}", fontsize="small")
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(works))], works)
        axis.set(title=title, ylabel="speed relative to octavo")
        if works:
            axis.legend()
    _save(figure, path, result)


def _speed(work: str, figures: Mapping[str, float]) -> float:
    return 1 / figures["ttft_p50"] if work == "prompt" else figures["out_tok_s"]


def plot_load(result: Result, outcomes: Sequence[Outcome], path: Path) -> None:
    """Cumulative distributions of TTFT, gaps and whole times of each kind of request, and output tokens per second over time."""
    require_matplotlib()
    figure, axes = _figure(4)
    good = [outcome for outcome in outcomes if outcome.first_s is not None and outcome.error is None]
    for kind in dict.fromkeys(outcome.kind for outcome in good):
        ours = [outcome for outcome in good if outcome.kind == kind]
        gaps_s = np.concatenate([np.frombuffer(outcome.gaps_s) for outcome in ours if outcome.gaps_s] or [np.empty(0)])
        for axis, times_ms in zip(
            axes, (np.array([o.ttft_ms for o in ours]), gaps_s * 1e3, np.array([o.e2el_ms for o in ours])), strict=False
        ):
            if len(times_ms):
                axis.ecdf(times_ms, label=kind or "requests")
        counts = np.bincount(np.concatenate([outcome.token_times_s for outcome in ours]).astype(int))
        axes[3].step(range(len(counts)), counts, where="post", label=kind or "requests")
    for axis, title in zip(axes, ("time to first token", "gap between tokens", "end to end"), strict=False):
        axis.set(title=title, xlabel="ms", ylabel="share of requests or gaps", xscale="log")
    axes[3].set(title="output", xlabel="second of the run", ylabel="tokens per second")
    axes[0].legend()
    _save(figure, path, result)


def plot_scenario(results: Sequence[Result], path: Path) -> None:
    """Distributions of TTFT and of gaps between tokens, run by run and kind by kind; results of simulations are dashed."""
    require_matplotlib()
    figure, axes = _figure(2)
    for result in results:
        style = "-" if result["by"] == "server" else "--"
        number = 0
        for label, run in result["runs"].items():
            for kind, found in (run["kinds"] or {"": run}).items():
                name = f"{label}: {kind}" if kind else label
                for axis, key in zip(axes, ("ttft", "itl"), strict=True):
                    if key in found["quantiles"]:
                        title = name if style == "-" else f"{name}, simulated"
                        axis.plot(found["quantiles"][key], QUANTILES, linestyle=style, color=f"C{number}", label=title)
                number += 1
    for axis, title in zip(axes, ("time to first token", "gap between tokens"), strict=True):
        axis.set(title=title, xlabel="ms", ylabel="share below", xscale="log")
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small")
    _save(figure, path, results[0])


def _figure(columns: int) -> tuple[Any, Any]:
    # The object interface: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * columns, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _save(figure: Any, path: Path, result: Result) -> None:
    """As PNG or SVG, by the suffix. The same results give the same bytes."""
    from matplotlib import rc_context

    figure.suptitle(f"{result['machine']['cpu']}, {result['machine']['cpus']} CPUs, {result['date'][:10]}")
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with rc_context({"svg.hashsalt": "octavo"}):
        figure.savefig(path, metadata=metadata)
