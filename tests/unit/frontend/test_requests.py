"""RequestBuilder: what needs the model is checked before anything reaches the engine (O-01, O-02, O-05, O-16, O-21, O-24, O-42)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.contracts import TokenSampling
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.frontend.params import SamplingParams
from octavo.frontend.requests import RequestBuilder, Timeouts
from support.scripted import EOS, model_of, spell

CONTEXT = 100
MODEL = model_of(["word"], max_model_len=CONTEXT, max_logprobs=5)
BUILDER = RequestBuilder(MODEL)
VOCABULARY = 258


def sampling(prompt: Any = "abc", **params: Any) -> TokenSampling:
    return BUILDER.build(prompt, SamplingParams(**params)).requests[0].sampling


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**63, "1", True, None, 1.0])
def test_o01_ids_outside_the_vocabulary(bad: Any) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        BUILDER.build([1, bad], SamplingParams())
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**63])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", lambda bad: {bad: 5.0}),
        ("stop_token_ids", lambda bad: [3, bad]),
        ("allowed_token_ids", lambda bad: [3, bad]),
    ],
)
def test_o01_ids_in_parameters(field: str, value: Any, bad: int) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        sampling(**{field: value(bad)})
    assert refusal.value.param == field


def test_o01_ids_between_tokenizer_and_padded_embedding_are_refused() -> None:
    padded = model_of(vocab_size=200)
    with pytest.raises(InvalidRequestError):
        RequestBuilder(padded).build([200], SamplingParams())


@pytest.mark.parametrize("prompt", ["", []])
def test_o02_empty_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        BUILDER.build(prompt, SamplingParams())


@given(st.integers(1, 2 * CONTEXT), st.none() | st.integers(1, 2 * CONTEXT))
def test_o16_the_context_limit_is_exact(num_prompt: int, max_tokens: int | None) -> None:
    fits = num_prompt < CONTEXT and (max_tokens is None or num_prompt + max_tokens <= CONTEXT)
    if fits:
        expected = CONTEXT - num_prompt if max_tokens is None else max_tokens
        assert sampling([1] * num_prompt, max_tokens=max_tokens).max_tokens == expected
        return
    with pytest.raises(ContextLengthError) as refusal:
        sampling([1] * num_prompt, max_tokens=max_tokens)
    assert str(CONTEXT) in refusal.value.message
    assert str(num_prompt) in refusal.value.message
    assert refusal.value.code == "context_length_exceeded"


def test_a_request_that_can_never_fit_the_cache_is_refused() -> None:
    builder = RequestBuilder(model_of(max_model_len=CONTEXT, max_request_tokens=64))
    assert builder.build([1] * 30, SamplingParams(max_tokens=34)).requests
    with pytest.raises(ContextLengthError, match="64"):
        builder.build([1] * 30, SamplingParams(max_tokens=35))
    [request] = builder.build([1] * 30, SamplingParams(max_tokens=None)).requests
    assert request.sampling.max_tokens == 34
    with pytest.raises(ContextLengthError, match="64"):
        builder.build([1] * 64, SamplingParams(max_tokens=None))


def test_o42_an_over_long_text_is_refused_before_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MODEL.tokenizer), "encode", lambda *_, **__: pytest.fail("tokenized"))
    started_s = time.perf_counter()
    with pytest.raises(ContextLengthError, match="5000000 characters"):
        BUILDER.build("x" * 5_000_000, SamplingParams())
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 5_000_000}]}]
    with pytest.raises(ContextLengthError):
        BUILDER.build_chat(messages, SamplingParams())
    with pytest.raises(ContextLengthError):
        BUILDER.build([1] * 1_000_000, SamplingParams())
    assert time.perf_counter() - started_s < 0.2


def test_o05_logprobs_are_bounded_by_the_server() -> None:
    for field in ("logprobs", "prompt_logprobs"):
        assert getattr(sampling(**{field: 5}), field) == 5
        for count in (6, 100_000, -1):
            with pytest.raises(InvalidRequestError) as refusal:
                sampling(**{field: count})
            assert refusal.value.param == field
    unbounded = RequestBuilder(model_of(max_logprobs=-1))
    assert unbounded.build("x", SamplingParams(logprobs=-1)).requests[0].sampling.logprobs == -1


def test_n_choices_differ_in_choice_alone() -> None:
    prepared = BUILDER.build("abc", SamplingParams(n=3, seed=7), tenant="alice", priority=-2)
    assert [request.sampling.choice for request in prepared.requests] == [0, 1, 2]
    assert len({request.request_id for request in prepared.requests}) == 3
    assert {request.parent for request in prepared.requests} == {prepared.requests[0].parent}
    assert {request.sampling.seed for request in prepared.requests} == {7}
    assert {(request.tenant, request.priority) for request in prepared.requests} == {("alice", -2)}
    assert prepared.prompt == "abc"
    assert prepared.prompt_token_ids == (97, 98, 99)


def test_a_priority_that_nobody_looks_at_is_refused() -> None:
    builder = RequestBuilder(MODEL, priorities=False)
    assert builder.build("x", SamplingParams(), priority=0).requests[0].priority == 0
    with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as refusal:
        builder.build("x", SamplingParams(), priority=1)
    assert refusal.value.param == "priority"


def test_timeouts_reach_every_choice_and_are_checked() -> None:
    prepared = BUILDER.build("x", SamplingParams(n=2), timeouts=Timeouts(waiting_timeout=1.5, decode_timeout=3))
    limits = {(one.waiting_timeout_s, one.prefill_timeout_s, one.decode_timeout_s) for one in prepared.requests}
    assert limits == {(1.5, None, 3)}
    for field in ("waiting_timeout", "prefill_timeout", "decode_timeout"):
        for wrong in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequestError) as refusal:
                Timeouts(**{field: wrong})
            assert refusal.value.param == field


def test_o35_ids_are_our_own() -> None:
    ids = [BUILDER.build("x", SamplingParams()).requests[0].request_id for _ in range(100)]
    assert len(set(ids)) == 100


def test_o21_seeds() -> None:
    assert sampling(seed=-1).seed == 2**64 - 1
    assert sampling(seed=2**63).seed == 2**63
    drawn = {sampling().seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_sampling_in_terms_of_tokens() -> None:
    result = sampling(
        top_k=-1,
        logit_bias={5: 1, 3: -2.5},
        stop_token_ids=[9, 8, 9],
        allowed_token_ids=[4, 2, 4],
        bad_words=["ab", " c"],
        ignore_eos=True,
        min_tokens=2,
    )
    assert result.top_k == 0
    assert result.logit_bias == ((3, -2.5), (5, 1.0))
    assert result.stop_token_ids == (9, 8)
    assert result.allowed_token_ids == (2, 4)
    assert result.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))
    assert (result.eos_token_ids, result.ignore_eos, result.min_tokens) == ((EOS,), True, 2)


def test_top_p_zero_is_the_most_likely_token() -> None:
    assert (sampling(top_p=0).top_k, sampling(top_p=0).top_p) == (1, 1.0)
    assert sampling(top_k=10**9).top_k == 0


def test_min_tokens_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        sampling([1] * 90, max_tokens=None, min_tokens=11)
    assert refusal.value.param == "min_tokens"


def test_cache_salt_is_a_namespace() -> None:
    plain = BUILDER.build("x", SamplingParams()).requests[0]
    salted = BUILDER.build("x", SamplingParams(), cache_salt="a").requests[0]
    assert plain.namespace == b""
    assert salted.namespace != b""
    for salt in ("", "x" * 2000):
        with pytest.raises(InvalidRequestError):
            BUILDER.build("x", SamplingParams(), cache_salt=salt)


def test_chat_goes_through_the_template() -> None:
    prepared = BUILDER.build_chat([{"role": "user", "content": "hi"}], SamplingParams())
    assert prepared.prompt == "user: hi\nassistant: "
    assert list(prepared.prompt_token_ids) == spell("user: hi\nassistant: ")
    assert BUILDER.tokenize_chat([{"role": "user", "content": "hi"}]) == list(prepared.prompt_token_ids)


def test_o23_without_a_template_chat_is_refused_and_completions_work() -> None:
    builder = RequestBuilder(model_of(chat_template=None, chat_template_error="it has a hole in line 3"))
    with pytest.raises(InvalidRequestError, match="hole in line 3"):
        builder.build_chat([{"role": "user", "content": "hi"}], SamplingParams())
    assert builder.build("hi", SamplingParams()).requests


@pytest.mark.parametrize("messages", [[], [1], [{"role": "user", "content": 5}], [{"role": "user"}], "hi"])
def test_o22_malformed_messages(messages: Any) -> None:
    with pytest.raises(InvalidRequestError):
        BUILDER.build_chat(messages, SamplingParams())
