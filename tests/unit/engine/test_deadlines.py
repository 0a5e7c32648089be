"""Limits on waiting, prefill and decode: each ends a request with an error of its own and frees what it held."""

from __future__ import annotations

import pytest

from octavo.contracts import FinishReason, RequestTimes
from support.fake_executor import Harness, layout, request


def outcome(harness: Harness, name: str) -> tuple[FinishReason | None, str | None, int]:
    answer = harness.answer(name)
    return answer.finish_reason, answer.error_code, len(answer.token_ids)


def times(harness: Harness, name: str) -> RequestTimes:
    finished = (times for output in harness.outbox.outputs for times in output.stats.finished)
    return next(times for times in finished if times.request_id == name)


@pytest.mark.parametrize("whose", ["server", "request"])
@pytest.mark.parametrize(
    ("phase", "expected", "finished_s"),
    [
        ("waiting", (0, "waiting_timeout"), 3.0),
        ("prefill", (0, "prefill_timeout"), 13.0),
        ("decode", (4, "decode_timeout"), 16.0),
    ],
)
def test_each_phase_has_its_limit(whose: str, phase: str, expected: tuple[int, str], finished_s: float) -> None:
    """A step takes one second of the harness's clock. "busy" holds the only slot until second 10, then the prompt takes 3 steps."""
    limit = {f"{phase}_timeout": 3.0} if whose == "server" and phase != "decode" else {}
    own = {f"{phase}_timeout_s": 3.0} if not limit else {}
    harness = Harness(layout(40), max_num_seqs=1, max_num_batched_tokens=8, **limit)
    num_busy = 9 if phase != "waiting" else 12
    harness.add(request("busy", range(8), num_busy + 1, **({"waiting_timeout_s": 99.0} if whose == "request" else {})))
    harness.add(request("a", range(30, 62 if phase == "prefill" else 54), 50, **own))
    harness.run()
    num_tokens, code = expected
    assert outcome(harness, "a") == (FinishReason.ERROR, code, num_tokens)
    assert times(harness, "a").finished_s == finished_s
    assert times(harness, "a").error_code == code
    harness.check_answers(except_for=["a"])


def test_the_shorter_of_two_limits_holds() -> None:
    for server_s, own_s in ((2.0, 5.0), (5.0, 2.0)):
        harness = Harness(layout(40), decode_timeout=server_s)
        harness.add(request("a", range(6), 50, decode_timeout_s=own_s))
        harness.run()
        assert outcome(harness, "a")[1:] == ("decode_timeout", 3)
        assert "2 s" in (harness.answer("a").error_message or "")


def test_waiting_counts_from_arrival() -> None:
    harness = Harness(layout(40), waiting_timeout=5.0)
    harness.clock.now_s = 100.0
    harness.add(request("late", range(6), arrival_s=95.0), request("fresh", range(6), arrival_s=95.5))
    harness.run()
    assert outcome(harness, "late") == (FinishReason.ERROR, "waiting_timeout", 0)
    assert outcome(harness, "fresh")[0] is FinishReason.LENGTH


def test_time_in_which_a_request_is_preempted_counts_in_its_phase() -> None:
    harness = Harness(layout(60), max_num_seqs=1, scheduling_policy="priority", waiting_timeout=4.0)
    harness.add(request("low", range(6), 30, priority=1, decode_timeout_s=6.0))
    harness.step()
    harness.add(request("high", range(20, 26), 20, arrival_s=1.0))
    harness.run()
    assert outcome(harness, "low") == (FinishReason.ERROR, "decode_timeout", 1)
    assert times(harness, "low").finished_s == 7.0
    assert outcome(harness, "high") == (FinishReason.LENGTH, None, 20)


def test_an_ended_request_is_over_no_deadline() -> None:
    harness = Harness(layout(40), waiting_timeout=3.0, prefill_timeout=3.0, decode_timeout=3.0)
    harness.add(request("a", range(6), 2), request("b", range(6), 50))
    harness.step()
    harness.cancel("b")
    harness.run()
    harness.clock.now_s += 100.0
    assert harness.step() is None
    assert len(harness.scheduler._deadlines._queue) == 0
    harness.check_answers(except_for=["b"])


def test_when_all_expire_there_is_nothing_to_plan() -> None:
    harness = Harness(layout(40), decode_timeout=1.0)
    harness.add(request("a", range(6), 50))
    harness.step()
    harness.clock.now_s += 5.0
    assert harness.step() is None
    assert outcome(harness, "a")[1] == "decode_timeout"
    harness.scheduler.check_idle()
