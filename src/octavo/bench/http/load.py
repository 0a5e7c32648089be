"""One load on a running server: the clients' side, and beside it the engine's, as far as the server's metrics tell."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from octavo.bench import results
from octavo.bench.figures import Outcome, by_kind, figures
from octavo.bench.http.client import Progress, Target, drive, fetch
from octavo.bench.traffic import Job, Traffic
from octavo.errors import ConfigError

_POLL_S = 1.0
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
}
_PREEMPTIONS = "vllm:num_preemptions"


async def run_load(
    traffic: Traffic,
    target: Target,
    options: Mapping[str, Any],
    *,
    goodput: Mapping[str, float] | None = None,
    num_warmups: int = 2,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Warms up, sends the traffic, and returns the result as JSON-ready values and the jobs' stories.

    Raises ConfigError when not even the warm-up is answered.
    """
    if num_warmups:
        warm_up = Traffic(
            name="warm-up",
            jobs=tuple(Job(prompt=((f"warm-up {n}", 40),), output_tokens=8) for n in range(num_warmups)),
            max_concurrency=1,
            seed=traffic.seed,
        )
        answers = await drive(warm_up, target)
        if all(answer.error for answer in answers):
            raise ConfigError(f"{target.url} does not answer: {answers[0].error}", param="base_url")
    result = results.header("serve", dict(options)) | {"model": target.model, "workload": traffic.name}
    observer = _Observer(target)
    await observer.poll()
    watching = asyncio.create_task(observer.watch())
    try:
        outcomes = await drive(traffic, target, progress)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    await observer.poll()
    result |= figures(outcomes, goodput) | {"kinds": by_kind(outcomes, goodput), "engine": observer.figures()}
    result["load_after"] = results.load_average()
    return result, outcomes


class _Observer:
    """Reads the server's metrics once per second. A server without such metrics is loaded all the same."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._seen: dict[str, list[float]] = {name: [] for name in (*_GAUGES, "preemptions")}

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self.poll()

    async def poll(self) -> None:
        try:
            text = (await fetch(self._target.base_url, "/metrics", self._target.keys.get(""))).decode()
            families = {family.name: family for family in text_string_to_metric_families(text)}
        except (ConfigError, ValueError):
            return
        for name, metric in (*_GAUGES.items(), ("preemptions", _PREEMPTIONS)):
            if metric in families:
                counted = [s.value for s in families[metric].samples if not s.name.endswith("_created")]
                self._seen[name].append(sum(counted))

    def figures(self) -> dict[str, float]:
        """Means and maxima of the gauges that were seen, and preemptions since the start."""
        found: dict[str, float] = {}
        for name in _GAUGES:
            if values := self._seen[name]:
                found |= {f"{name}_mean": statistics.fmean(values), f"{name}_max": max(values)}
        if counts := self._seen["preemptions"]:
            found["preemptions"] = counts[-1] - counts[0]
        return found
