"""Figures of outcomes, by arithmetic that can be done in the head."""

from __future__ import annotations

import pytest

from octavo.bench.figures import Outcome, by_kind, figures, parse_goodput, percentile
from octavo.errors import ConfigError


def _outcome(sent_s: float, *token_times_s: float, kind: str = "", prompt: int = 10, cached: int = 0) -> Outcome:
    outcome = Outcome(kind=kind, sent_s=sent_s, prompt_tokens=prompt, cached_tokens=cached)
    for time_s in token_times_s:
        outcome.token(time_s)
    outcome.output_tokens = len(token_times_s)
    return outcome


def test_figures() -> None:
    outcomes = [
        _outcome(0.0, 0.1, 0.2, 0.4),
        _outcome(0.1, 0.5, cached=5),
        Outcome(kind="", sent_s=0.2, error="503 full"),
    ]
    found = figures(outcomes, {"ttft": 200, "e2el": 1000})
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["503 full"])
    assert found["duration"] == pytest.approx(0.5)
    assert found["total_output_tokens"] == 4
    assert found["output_throughput"] == pytest.approx(8)
    assert found["total_token_throughput"] == pytest.approx(48)
    assert found["cached_percent"] == pytest.approx(25)
    assert found["request_goodput"] == pytest.approx(2)  # one of two meets 200 ms, in half a second
    assert found["mean_ttft_ms"] == pytest.approx(250)
    assert found["mean_itl_ms"] == pytest.approx(150)
    assert found["p50_tpot_ms"] == pytest.approx(150)
    assert found["p99_e2el_ms"] == pytest.approx(400)
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 2


def test_nothing_that_came_back() -> None:
    found = figures([Outcome(kind="", sent_s=0.0, error="x")])
    assert (found["completed"], found["failed"]) == (0, 1)
    assert "mean_ttft_ms" not in found
    assert found["output_throughput"] == 0


def test_kinds_share_one_duration() -> None:
    outcomes = [_outcome(0.0, 1.0, kind="chat"), _outcome(0.0, 0.5, 2.0, kind="long")]
    kinds = by_kind(outcomes)
    assert kinds["chat"]["output_throughput"] == pytest.approx(0.5)
    assert kinds["long"]["output_throughput"] == pytest.approx(1.0)
    assert by_kind(outcomes[:1]) == {}


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    for wrong in ("ttft", "itl:5", "ttft:-1", "ttft:x", "ttft:inf"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goodput([wrong])


def test_percentile() -> None:
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
