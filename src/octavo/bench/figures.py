"""What became of jobs, and the figures made of it: the same for a simulation and for a real server. Measures nothing itself.

Names are those of vLLM's serving benchmark: TTFT is the time to the first token, TPOT the mean time per token after it, ITL the gap
between two tokens as they reach the client, E2EL the whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
QUANTILES = (*(share / 40 for share in range(40)), 0.98, 0.985, 0.99, 0.995, 0.999, 1.0)


class Outcome(msgspec.Struct, kw_only=True):
    """One job's story. Times in seconds from the start of the run; `gaps_s` lies between its tokens. With `error` it failed."""

    kind: str
    tenant: str = ""
    sent_s: float
    first_s: float | None = None
    last_s: float = 0.0
    gaps_s: array[float] = msgspec.field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def token(self, now_s: float) -> None:
        """Notes that a token (or several at once) arrived."""
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s

    @property
    def token_times_s(self) -> npt.NDArray[np.float64]:
        """When each token came."""
        if self.first_s is None:
            return np.empty(0)
        return self.first_s + np.concatenate(([0.0], np.cumsum(np.frombuffer(self.gaps_s)) if self.gaps_s else []))

    @property
    def ttft_ms(self) -> float:
        """From being sent to the first token."""
        assert self.first_s is not None
        return (self.first_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean per token after the first; None where there is none."""
        assert self.first_s is not None
        return (self.last_s - self.first_s) * 1e3 / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def e2el_ms(self) -> float:
        """From being sent to the last token."""
        return (self.last_s - self.sent_s) * 1e3


def figures(
    outcomes: Sequence[Outcome], goodput: Mapping[str, float] | None = None, duration_s: float | None = None
) -> dict[str, Any]:
    """Counts, rates, and mean, median, std and percentiles of the times. `goodput`: limits in ms by ttft, tpot, e2el.

    Rates are per second of `duration_s`, by default from the first sent to the last token.
    """
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.first_s is not None]
    end_s = max((outcome.last_s for outcome in good), default=0.0)
    begin_s = min((outcome.sent_s for outcome in outcomes), default=0.0)
    seconds = max(end_s - begin_s, 1e-9) if duration_s is None else duration_s
    prompt, cached = sum(o.prompt_tokens for o in good), sum(o.cached_tokens for o in good)
    output = sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration": seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": cached,
        "cached_percent": 100 * cached / prompt if prompt else 0.0,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    if goodput:
        result["request_goodput"] = sum(_meets(outcome, goodput) for outcome in good) / seconds
    for name, values in _times(good).items():
        if len(values):
            result |= _spread(name, values)
    if errors := [outcome.error for outcome in outcomes if outcome.error is not None]:
        result["errors"] = sorted(set(errors))[:5]
    return result


def quantiles(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The times in ms at the shares `QUANTILES` of all requests or gaps: enough to draw a distribution."""
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.first_s is not None]
    return {
        name: [round(float(value), 3) for value in np.quantile(values, QUANTILES)]
        for name, values in _times(good).items()
        if len(values)
    }


def by_kind(outcomes: Sequence[Outcome], goodput: Mapping[str, float] | None = None) -> dict[str, dict[str, Any]]:
    """The figures of each kind of job, where there are several; rates of all are over the same time."""
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    if len(kinds) < 2:
        return {}
    duration_s = figures(outcomes)["duration"]
    return {kind or "other": figures([o for o in outcomes if o.kind == kind], goodput, duration_s) for kind in kinds}


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` in ms. Raises ConfigError."""
    parsed: dict[str, float] = {}
    for limit in limits:
        name, _, text = limit.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < value < float("inf"):
            raise ConfigError(
                f"--goodput {limit!r}: give ttft:MS, tpot:MS or e2el:MS with a limit in ms", param="goodput"
            )
        parsed[name] = value
    return parsed


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest values, of which there must be one."""
    return float(np.percentile(values, percent))


def _times(good: Sequence[Outcome]) -> dict[str, npt.NDArray[np.float64]]:
    """All TTFT, TPOT, gaps and whole times of requests that succeeded, in ms."""
    return {
        "ttft": np.array([o.ttft_ms for o in good]),
        "tpot": np.array([tpot for o in good if (tpot := o.tpot_ms) is not None]),
        "itl": np.concatenate([np.frombuffer(o.gaps_s) for o in good if o.gaps_s] or [np.empty(0)]) * 1e3,
        "e2el": np.array([o.e2el_ms for o in good]),
    }


def _spread(name: str, values: Any) -> dict[str, float]:
    spread = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    spread |= {
        f"p{percent}_{name}_ms": value
        for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
    spread[f"max_{name}_ms"] = values.max()
    return {key: float(value) for key, value in spread.items()}


def _meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    times = {"ttft": outcome.ttft_ms, "tpot": outcome.tpot_ms or 0.0, "e2el": outcome.e2el_ms}
    return all(times[name] <= limit for name, limit in limits.items())


def _peak_rate(outcomes: Sequence[Outcome]) -> int:
    """Most tokens that arrived within a whole second of the run."""
    times_s = np.concatenate([outcome.token_times_s for outcome in outcomes] or [np.empty(0)])
    return int(np.bincount(times_s.astype(int)).max()) if len(times_s) else 0


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(o.sent_s, 1) for o in outcomes] + [(o.last_s, -1) for o in outcomes])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
