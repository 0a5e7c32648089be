"""Cost models and loads on servers, real and simulated, as lines to print. Measures nothing and reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.bench.tables import duration, table

Result = Mapping[str, Any]


def costs_table(result: Result) -> list[str]:
    """The terms of a cost model, and how far they are from what was measured, as lines of Markdown."""
    costs = result["costs"]
    step, serving, scheduler = costs["step"], costs["serving"], costs["scheduler"]
    terms = [
        (f"a step of {knot} tokens", duration(seconds))
        for knot, seconds in zip(step["token_knots"], step["tokens"], strict=True)
    ]
    terms += [
        ("each row that samples", duration(step["sampled"])),
        ("1,000 positions seen by decodes", duration(1e3 * step["decode_pairs"])),
        ("1,000 positions seen by tokens of prompts", duration(1e3 * step["prefill_pairs"])),
        ("scheduler, each step", duration(scheduler["step"])),
        ("scheduler, each row", duration(scheduler["row"])),
        ("server and client, each step", duration(serving["step"])),
        ("server and client, each token", duration(serving["token"])),
        ("server and client, each request", duration(serving["request"])),
    ]
    fit = [
        (kind, line["points"], *(f"{line[key]:.1f} %" for key in ("median_percent", "p90_percent", "bias_percent")))
        for kind, line in result["fit"].items()
    ]
    return [
        *table(("term", "time"), terms, text_columns=1),
        "",
        *table(("error of the fit: steps of", "points", "median", "p90", "bias"), fit, text_columns=1),
    ]


_LOAD_LINES = (
    ("Successful requests:", "completed", 0),
    ("Failed requests:", "failed", 0),
    ("Peak concurrent requests:", "max_concurrent_requests", 0),
    ("Benchmark duration (s):", "duration", 2),
    ("Total input tokens:", "total_input_tokens", 0),
    ("Cached input tokens:", "total_cached_tokens", 0),
    ("Cached input tokens (%):", "cached_percent", 2),
    ("Total generated tokens:", "total_output_tokens", 0),
    ("Request throughput (req/s):", "request_throughput", 2),
    ("Request goodput (req/s):", "request_goodput", 2),
    ("Output token throughput (tok/s):", "output_throughput", 2),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", 0),
    ("Total token throughput (tok/s):", "total_token_throughput", 2),
)
_LOAD_TIMES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
_ENGINE_LINES = (
    ("Engine steps:", "steps", 0),
    ("Median step (ms):", "step_p50_ms", 2),
    ("P95 step (ms):", "step_p95_ms", 2),
    ("Mean running requests:", "running_mean", 1),
    ("Mean waiting requests:", "waiting_mean", 1),
    ("Most waiting requests:", "waiting_max", 0),
    ("Mean KV cache use (%):", "kv_usage_mean", 100),
    ("Peak KV cache use (%):", "kv_usage_max", 100),
    ("Prefill tokens per step:", "prefill_tokens_per_step", 1),
    ("Preemptions:", "preemptions", 0),
    ("Of these for others' turn:", "displaced", 0),
    ("Simulated in (s):", "simulation_wall_s", 2),
)


def load_report(result: Result, title: str) -> list[str]:
    """The figures of a load on a server, in the shape that vLLM's serving benchmark prints, and below it a table of the kinds of
    requests.
    """
    lines = [f"{title:=^50}"]
    lines += [_aligned(text, result[key], digits) for text, key, digits in _LOAD_LINES if key in result]
    for name, (heading, short) in _LOAD_TIMES.items():
        if f"mean_{name}_ms" in result:
            lines.append(f"{heading:-^50}")
            lines += [
                _aligned(f"{text} {short} (ms):", result[f"{key}_{name}_ms"], 2)
                for text, key in (
                    ("Mean", "mean"),
                    ("Median", "median"),
                    ("P90", "p90"),
                    ("P95", "p95"),
                    ("P99", "p99"),
                )
            ]
    if engine := result.get("engine"):
        lines.append(f"{'Engine':-^50}")
        lines += [
            _aligned(text, 100 * engine[key] if digits == 100 else engine[key], 1 if digits == 100 else digits)
            for text, key, digits in _ENGINE_LINES
            if key in engine
        ]
    lines.append("=" * 50)
    if kinds := result.get("kinds"):
        lines += ["", *load_table(kinds)]
    return lines + [f"failed: {error}" for error in result.get("errors", ())]


_LOAD_COLUMNS = {
    "completed": "requests",
    "output_throughput": "tok/s",
    "cached_percent": "cached %",
    "median_ttft_ms": "TTFT p50 ms",
    "p95_ttft_ms": "p95",
    "median_itl_ms": "ITL p50 ms",
    "p95_itl_ms": "p95",
    "median_e2el_ms": "E2EL p50 ms",
    "p95_e2el_ms": "p95",
}


def load_table(results: Mapping[str, Result], what: str = "requests of") -> list[str]:
    """Figures of several loads, one a line of Markdown."""
    rows = [
        (name, *(f"{result[key]:.4g}" if key in result else "" for key in _LOAD_COLUMNS))
        for name, result in results.items()
    ]
    return table((what, *_LOAD_COLUMNS.values()), rows, text_columns=1)


def _aligned(text: str, value: float, digits: int) -> str:
    return f"{text:<40} {value:<10.{digits}f}"


def scenario_report(result: Result) -> list[str]:
    """A scenario's runs and claims, as lines of Markdown."""
    lines: dict[str, Result] = {}
    for label, run in result["runs"].items():
        kinds = run["kinds"] or {"": run}
        lines |= {f"{label}: {kind}" if kind else label: found for kind, found in kinds.items()}
    claims = [
        (
            claim["text"],
            f"{claim['value']:.3g} {claim['unit']}",
            _limit(claim),
            {True: "yes", False: "NO", None: ""}[claim["holds"]],
        )
        for claim in result["claims"]
    ]
    report = load_table(lines, "run")
    return [*report, "", *table(("claim", "measured", "limit", "holds"), claims, text_columns=1)] if claims else report


_COMPARED = {
    "output_throughput": "tok/s",
    "median_ttft_ms": "TTFT p50",
    "median_itl_ms": "ITL p50",
    "median_e2el_ms": "E2EL p50",
}


def comparison(result: Result, other: Result) -> list[str]:
    """What the second result says of each run, as shares of what the first says: for a prediction and what then came."""
    rows = [
        (
            label,
            *(
                f"{100 * other['runs'][label][key] / run[key]:.0f} %"
                if run.get(key) and key in other["runs"][label]
                else ""
                for key in _COMPARED
            ),
        )
        for label, run in result["runs"].items()
        if label in other["runs"]
    ]
    what = f"{other['by']} {other['date']}, of what {result['by']} {result['date']} gave"
    return [what + ":", "", *table(("run", *_COMPARED.values()), rows, text_columns=1)]


def _limit(claim: Result) -> str:
    for key, words in (("at_most", "at most"), ("at_least", "at least")):
        if claim[key] is not None:
            return f"{words} {claim[key]:g} {claim['unit']}"
    return ""
