"""Stop strings: the outcome depends on the text, not on how it is cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo.text.stop import StopMatcher

SMALL = st.text(alphabet="ab<é", min_size=1, max_size=5)


def cut(text: str, borders: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in pairwise(places)] or [""]


def run(pieces: Sequence[str], stops: Sequence[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    released = []
    for piece in pieces:
        released.append(matcher.push(piece))
        if matcher.stopped is not None:
            break
    else:
        released.append(matcher.flush())
    return released, matcher.stopped


def by_definition(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The earliest start wins, then the shortest stop."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + length] if include else text[:start], stop


@given(
    st.text(alphabet="ab<é", max_size=40),
    st.lists(SMALL, min_size=1, max_size=4),
    st.lists(st.integers(0, 100), max_size=30),
    st.booleans(),
)
@example("abx", ["abc", "b"], [1, 2], False)
@example("aab", ["aaa", "ab"], [1, 2], False)
def test_any_cut_gives_what_the_whole_text_says(text: str, stops: list[str], borders: list[int], include: bool) -> None:
    released, stopped = run(cut(text, borders), stops, include=include)
    assert ("".join(released), stopped) == by_definition(text, stops, include)


@given(st.text(alphabet="ab<", max_size=30), st.lists(SMALL, min_size=1, max_size=3))
def test_holds_back_no_more_than_could_be_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for end, character in enumerate(text, start=1):
        released += matcher.push(character)
        if matcher.stopped is not None:
            return
        held = text[len(released) : end]
        # Something is held only if it begins with a beginning of a stop that reaches the end of the text.
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("include", [False, True])
def test_stop_over_several_tokens(include: bool) -> None:
    """O-09: the script of the case, cut exactly, nothing of the stop leaks."""
    script = [" al", "pha", " ST", "OP_", "HE", "RE!", " tail"]
    released, stopped = run(script, ["STOP_HERE"], include=include)
    assert "".join(released) == (" alpha STOP_HERE" if include else " alpha ")
    assert stopped == "STOP_HERE"
    if not include:
        assert all("S" not in piece for piece in released)


def test_failed_match_is_given_back() -> None:
    """O-09: text held for a match that fails is released as soon as it has failed."""
    matcher = StopMatcher(["STOP_HERE"])
    assert [matcher.push(piece) for piece in (" ST", "OP_", "ever")] == [" ", "", "STOP_ever"]
    assert matcher.flush() == ""
    assert matcher.stopped is None


def test_of_two_stops_the_prefix_wins_at_once() -> None:
    """O-09: one stop is the beginning of another."""
    matcher = StopMatcher(["STOP_HERE", "STOP"])
    assert matcher.push("a STOP") == "a "
    assert matcher.stopped == "STOP"
    assert matcher.push("_HERE") == ""


def test_a_complete_stop_waits_for_an_earlier_start() -> None:
    matcher = StopMatcher(["abcd", "c"])
    assert matcher.push("xabc") == "x"
    assert matcher.stopped is None
    assert matcher.push("e") == "ab"
    assert matcher.stopped == "c"


def test_end_of_text_decides_for_the_complete_stop() -> None:
    matcher = StopMatcher(["abcd", "c"], include=True)
    assert matcher.push("xabc") + matcher.flush() == "xabc"
    assert matcher.stopped == "c"


def test_inactive_text_never_matches_across_the_border() -> None:
    """O-20: before min_tokens nothing stops, and a stop string needs all of its text afterwards."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("STOP ST", active=False) == "STOP ST"
    assert matcher.push("OP ") == "OP "
    assert matcher.push("ST") == ""
    assert matcher.push("x", active=False) == "STx"
    assert matcher.push("STOP") == ""
    assert matcher.stopped == "STOP"


@pytest.mark.parametrize("stop", ["", "\ud83d"])
def test_impossible_stops_are_refused(stop: str) -> None:
    """O-22: an empty stop would end every text at once; half a surrogate pair is no text (O-07)."""
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(["ok", stop])
    assert caught.value.param == "stop"


def test_time_is_linear_for_nasty_stops() -> None:
    """A million characters that almost complete a long stop string at every place."""

    def cpu_s(length: int) -> float:
        matcher = StopMatcher(["ab" * 500 + "c"])
        text = "ab" * 50
        start = time.thread_time()
        for _ in range(length // 100):
            matcher.push(text)
        return time.thread_time() - start

    cpu_s(10_000)
    assert cpu_s(400_000) < 40 * max(cpu_s(40_000), 0.001)
