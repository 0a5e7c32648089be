"""SamplingParams refuse wrong values when they are made, naming the field (cases O-05, O-06, O-20, O-21, O-22)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.errors import InvalidRequestError

FLOATS = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}
INTEGERS = {"n": (1, 128), "top_k": (-1, 2**31 - 1), "seed": (-(2**63), 2**64 - 1), "min_tokens": (0, 16)}


def refused(field: str, value: Any, **others: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{field: value, **others})
    assert refusal.value.param == field
    assert refusal.value.http_status == 400
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize("field", FLOATS)
@given(st.floats() | st.integers())
def test_o06_floats_are_finite_and_in_range(field: str, value: float) -> None:
    low, high = FLOATS[field]
    if math.isfinite(value) and low <= value <= high:
        assert getattr(SamplingParams(**{field: value}), field) == value
    else:
        refused(field, value)


@pytest.mark.parametrize("field", INTEGERS)
@given(st.integers())
def test_o05_integers_are_in_range(field: str, value: int) -> None:
    low, high = INTEGERS[field]
    if low <= value <= high:
        assert getattr(SamplingParams(**{field: value}), field) == value
    else:
        refused(field, value)


@pytest.mark.parametrize("field", [*FLOATS, *INTEGERS, "max_tokens", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", ["NaN", "1", True, [1], 10**400, -(10**400)])
def test_numbers_are_numbers(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize("field", ["n", "top_k", "max_tokens", "min_tokens", "logprobs"])
def test_integers_are_no_fractions(field: str) -> None:
    refused(field, 1.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 10**12),
        ("logprobs", -2),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x"] * 100_000),
        ("stop", "x" * 10_000_000),
        ("stop", [1]),
        ("stop", 7),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", list(range(1025))),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("ignore_eos", 1),
        ("detokenize", None),
    ],
)
def test_wrong_values_are_refused(field: str, value: Any) -> None:
    refused(field, value)


def test_o20_min_tokens_must_not_exceed_max_tokens() -> None:
    refused("min_tokens", 5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=4, max_tokens=None).max_tokens is None


def test_stop_strings_need_text() -> None:
    refused("stop", "x", detokenize=False)


def test_what_is_not_built_is_named() -> None:
    assert not SamplingParams(spaces_between_special_tokens=False).spaces_between_special_tokens
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_stop_takes_one_string_or_several() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "bc"]).stop_strings == ("a", "bc")
