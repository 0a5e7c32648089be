"""Streams: stop strings and characters over token borders, hidden end tokens, logprobs (cases O-09, O-10, O-20)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.contracts import EngineOutput, FinishReason, RequestId, RequestTimes, StepStats, TokenEvent
from octavo.errors import ContextLengthError, EngineDeadError, EngineError
from octavo.frontend.outputs import Delta
from octavo.frontend.params import SamplingParams
from octavo.frontend.requests import RequestBuilder
from octavo.frontend.stream import StreamTable
from support.scripted import EOS, WORD, model_of, one_by_one, spell, stream_all

STOP_WORDS = (" al", "pha", " ST", "OP_", "HE", "RE!", " tail", "ever")
STOP_MODEL = model_of(STOP_WORDS)


def ids(*words: str) -> list[int]:
    return [WORD + STOP_WORDS.index(word) for word in words]


def test_o09_stop_string_split_over_tokens() -> None:
    script = ids(" al", "pha", " ST", "OP_", "HE", "RE!", " tail")
    deltas, whole = stream_all(STOP_MODEL, one_by_one(script), stop=["STOP_HERE"])
    assert whole.text == " alpha "
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, "STOP_HERE")
    assert whole.token_ids == tuple(script[:6])
    assert all("ST" not in delta.text for delta in deltas)
    assert sum(delta.finish_reason is not None for delta in deltas) == 1


def test_o09_failed_match_is_flushed() -> None:
    _, whole = stream_all(STOP_MODEL, one_by_one(ids(" ST", "OP_", "ever")), stop=["STOP_HERE"])
    assert whole.text == " STOP_ever"
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.LENGTH, None)


def test_o09_held_text_is_flushed_at_the_end() -> None:
    _, whole = stream_all(STOP_MODEL, one_by_one(ids(" ST", "OP_")), stop=["STOP_HERE"])
    assert whole.text == " STOP_"


def test_o09_included_stop_string_ends_at_its_last_letter() -> None:
    script = ids(" al", " ST", "OP_", "HE", "RE!", " tail")
    _, whole = stream_all(STOP_MODEL, one_by_one(script), stop=["STOP_HERE"], include_stop_str_in_output=True)
    assert whole.text == " al STOP_HERE"


def test_o09_earliest_of_several_wins() -> None:
    script = ids(" ST", "OP_", "HE", "RE!")
    _, whole = stream_all(STOP_MODEL, one_by_one(script), stop=["STOP_HERE", "STOP"])
    assert (whole.text, whole.stop_reason) == (" ", "STOP")


def test_tokens_of_one_event_after_the_stop_string_are_dropped() -> None:
    script = ids(" al", " ST", "OP_", "pha")
    event = TokenEvent(request_id=RequestId("r"), token_ids=tuple(script), finish_reason=FinishReason.LENGTH)
    _, whole = stream_all(STOP_MODEL, [event], stop=["STOP"])
    assert whole.token_ids == tuple(script[:3])
    assert (whole.text, whole.finish_reason) == (" al ", FinishReason.STOP)


@pytest.mark.parametrize("text", ["é", "漢字", "👨‍👩‍👧", "aé漢👨‍👩‍👧z"])
def test_o10_characters_split_over_tokens(text: str) -> None:
    deltas, whole = stream_all(model_of(), one_by_one(spell(text)))
    assert whole.text == text
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert whole.token_ids == tuple(text.encode())


def test_o10_split_emoji_is_a_stop_string() -> None:
    _, whole = stream_all(model_of(), one_by_one(spell("ab👍cd")), stop=["👍"])
    assert (whole.text, whole.stop_reason) == ("ab", "👍")


def test_unfinished_character_at_the_end() -> None:
    _, whole = stream_all(model_of(), one_by_one(spell("a👍")[:-1]))
    assert whole.text == "a\ufffd"


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5)))
def test_any_cut_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    model = model_of()
    tokens = (*spell("ab" + text), 0)
    whole_event = TokenEvent(request_id=RequestId("r"), token_ids=tokens, finish_reason=FinishReason.LENGTH)
    _, expected = stream_all(model, [whole_event], stop=stops)
    events, start = [], 0
    for cut in cuts:
        events.append(TokenEvent(request_id=RequestId("r"), token_ids=tokens[start : start + cut]))
        start += cut
    events.append(TokenEvent(request_id=RequestId("r"), token_ids=tokens[start:], finish_reason=FinishReason.LENGTH))
    _, cut_up = stream_all(model, events, stop=stops)
    assert cut_up == expected


def test_end_token_is_counted_but_not_shown() -> None:
    script = [*spell("ab"), EOS]
    _, whole = stream_all(model_of(), one_by_one(script, FinishReason.STOP), skip_special_tokens=False)
    assert (whole.text, whole.token_ids, whole.stop_reason) == ("ab", tuple(script), None)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token_is_shown_only_when_included(include: bool, text: str) -> None:
    events = one_by_one(spell("ab"), FinishReason.STOP, stop_token=98)
    _, whole = stream_all(model_of(), events, include_stop_str_in_output=include)
    assert (whole.text, whole.token_ids, whole.stop_reason) == (text, (97, 98), 98)


def test_o20_stop_strings_wait_for_min_tokens() -> None:
    _, whole = stream_all(model_of(), one_by_one(spell("a.b.c.d")), stop=["."], min_tokens=4)
    assert whole.text == "a.b.c"
    assert len(whole.token_ids) == 6


def test_without_detokenizing_there_is_no_text() -> None:
    _, whole = stream_all(model_of(), one_by_one(spell("abc")), detokenize=False)
    assert (whole.text, whole.token_ids) == ("", (97, 98, 99))


def test_logprobs_carry_texts_and_bytes() -> None:
    _, whole = stream_all(model_of(), one_by_one(spell("é"), logprobs=True), logprobs=2)
    assert whole.logprobs is not None
    first = whole.logprobs[0]
    assert (first.token_id, first.token, first.bytes, first.rank) == (0xC3, "\ufffd", b"\xc3", 1)
    assert [(top.token_id, top.logprob) for top in first.top] == [(0xC3, -0.5), (7, -1.5)]


def test_errors_keep_their_kind() -> None:
    for code, kind in (
        ("context_length_exceeded", ContextLengthError),
        ("engine_error", EngineError),
        (None, EngineError),
    ):
        event = TokenEvent(
            request_id=RequestId("r"), finish_reason=FinishReason.ERROR, error_code=code, error_message="no"
        )
        _, whole = stream_all(model_of(), [event])
        assert type(whole.error) is kind
        assert whole.error.message == "no"
        assert whole.finish_reason is FinishReason.ERROR


def _output(event: TokenEvent, *finished: RequestTimes) -> EngineOutput:
    stats = StepStats(step=1, num_running=1, num_waiting=0, kv_usage=0.5, finished=finished)
    return EngineOutput(events=(event,), stats=stats)


def _times(request_id: RequestId) -> RequestTimes:
    return RequestTimes(
        request_id=request_id,
        finish_reason=FinishReason.ABORT,
        arrival_s=0,
        scheduled_s=0,
        first_token_s=0,
        finished_s=0,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_generated_tokens=2,
        num_preemptions=0,
        max_tokens=9,
    )


def test_a_stop_string_cancels_the_engine_and_counts_as_stopped() -> None:
    model, table, deltas = model_of(), StreamTable(), list[Delta]()
    prepared = RequestBuilder(model).build("x", SamplingParams(stop="b"))
    [request] = prepared.requests
    table.add(prepared, model, deltas.append)
    _, cancels = table.dispatch(_output(TokenEvent(request_id=request.request_id, token_ids=(97, 98))))
    assert cancels == (request.request_id,)
    assert len(table) == 0
    late = TokenEvent(request_id=request.request_id, token_ids=(99,), finish_reason=FinishReason.ABORT)
    stats, cancels = table.dispatch(_output(late, _times(request.request_id), _times(RequestId("other"))))
    assert cancels == ()
    assert [times.finish_reason for times in stats.finished] == [FinishReason.STOP, FinishReason.ABORT]
    assert [delta.text for delta in deltas] == ["a"]


def test_failing_all_ends_each_stream_once() -> None:
    model, table, deltas = model_of(), StreamTable(), list[Delta]()
    prepared = RequestBuilder(model).build("x", SamplingParams(n=3))
    table.add(prepared, model, deltas.append)
    error = EngineDeadError("gone")
    assert len(table.fail_all(error)) == 3
    assert table.fail_all(error) == ()
    assert sorted(delta.index for delta in deltas) == [0, 1, 2]
    assert all(delta.error is error and delta.finish_reason is FinishReason.ERROR for delta in deltas)
