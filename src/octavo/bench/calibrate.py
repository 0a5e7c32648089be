"""What server and client add to a step: a real server of the model, loaded at several concurrencies, against the simulation without them.

On a machine whose cores compute the model, tokenizing, streaming and the client take time from it. The terms are fitted to gaps between
tokens (per step and per token) and to the first token of a lone request (per request). The traffic is none of the workloads that
engines are compared on, so that those still test the simulator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from octavo.bench.figures import figures
from octavo.bench.http.client import Target, drive, first_model
from octavo.bench.http.server import command_line, serving
from octavo.bench.local.costs import Costs, fit_serving
from octavo.bench.local.simulate import simulate
from octavo.bench.traffic import Job, Traffic
from octavo.config import Config

Progress = Callable[[str, int, int], None]

_CONCURRENCIES = (1, 4, 16, 64)
_WORDS, _OUTPUT = 60, 32
_ALONE = 8
"""Lone requests, one after another, whose first tokens are timed."""


def add_serving(costs: Costs, config: Config, progress: Progress | None = None) -> tuple[Costs, list[dict[str, float]]]:
    """The costs with what the server adds, and the points that it was fitted to. Raises ConfigError when the server does not start."""
    report = progress or (lambda *_: None)
    most = min(config.scheduler.max_num_seqs, max(_CONCURRENCIES))
    concurrencies = [count for count in _CONCURRENCIES if count <= most]
    points = []
    with serving(command_line(config)) as url:
        target = Target(base_url=url, model=asyncio.run(first_model(url)))
        asyncio.run(drive(_traffic(2, seed=0), target))
        for number, count in enumerate(concurrencies):
            report(f"server, {count} at once", number, len(concurrencies))
            traffic = _traffic(count, seed=1 + number)
            real = figures(asyncio.run(drive(traffic, target)))
            bare = simulate(traffic, costs, config).figures()
            points.append(
                {"concurrency": count, "real_itl_ms": real["median_itl_ms"], "simulated_itl_ms": bare["median_itl_ms"]}
                | {"real_ttft_ms": real["median_ttft_ms"], "simulated_ttft_ms": bare["median_ttft_ms"]}
            )
    report("done", len(concurrencies), len(concurrencies))
    found = fit_serving([(p["concurrency"], (p["real_itl_ms"] - p["simulated_itl_ms"]) / 1e3) for p in points])
    # A lone request's first token takes one step more than the request itself.
    alone_s = (points[0]["real_ttft_ms"] - points[0]["simulated_ttft_ms"]) / 1e3 - found.step - found.token
    found = msgspec.structs.replace(found, request=max(0.0, alone_s))
    return msgspec.structs.replace(costs, serving=found), points


def _traffic(count: int, seed: int) -> Traffic:
    """`count` at once; for one, some one after another."""
    jobs = tuple(
        Job(prompt=((f"calibration {number}", _WORDS),), output_tokens=_OUTPUT)
        for number in range(_ALONE if count == 1 else count)
    )
    return Traffic(name="calibration", jobs=jobs, max_concurrency=count, seed=seed)
