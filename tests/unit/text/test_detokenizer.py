"""Incremental detokenization equals decoding at once, and never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.stop import StopMatcher
from octavo.text.tokenizer import Tokenizer
from support.vocabularies import byte_level, sentencepiece_golden, sentencepiece_metadata

BYTE_LEVEL = byte_level()
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata())
UNUSUAL = "\u00e9 \u6f22\u5b57 \U0001f468\u200d\U0001f469\u200d\U0001f467"


def pushed(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    texts, start = [], 0
    for size in sizes:
        texts.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*texts, detokenizer.push(ids[start:]), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_pushes_joined_are_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, continuation: bool
) -> None:
    """Also for ids in any order, that is bytes that are no UTF-8."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=30))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, continuation=continuation)
    whole = tokenizer.decode(ids, skip_special_tokens=skip, continuation=continuation)
    assert "".join(pushed(detokenizer, ids, sizes)) == whole


@given(st.text(max_size=20))
def test_no_replacement_character_in_valid_text(text: str) -> None:
    """O-10: a character split over tokens is held back until it is whole."""
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    pieces = [detokenizer.push((byte,)) for byte in BYTE_LEVEL.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def byte_ids(text: str) -> list[int]:
    return [byte_id(byte) for byte in text.encode()]


def byte_id(byte: int) -> int:
    return BYTE_LEVEL.pieces.index(bytes([byte]))


def test_unusual_characters_byte_by_byte() -> None:
    """O-10: e-acute, Chinese, a family emoji with joiners."""
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    assert [text for byte in byte_ids(UNUSUAL) if (text := detokenizer.push((byte,)))] == list(UNUSUAL)


def test_a_stop_that_is_one_emoji_over_four_tokens() -> None:
    """O-10: the matcher sees whole characters only."""
    detokenizer, matcher = Detokenizer(BYTE_LEVEL, skip_special_tokens=True), StopMatcher(["\U0001f389"])
    ids = byte_ids("a\U0001f388b\U0001f389c")
    assert "".join(matcher.push(detokenizer.push((token,))) for token in ids) == "a\U0001f388b"
    assert matcher.stopped == "\U0001f389"


def test_invalid_bytes_are_replaced_once_it_is_certain() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    assert detokenizer.push((byte_id(0xF0), byte_id(0x9F))) == ""
    assert detokenizer.push((byte_id(ord("a")),)) == "\ufffda"
    assert detokenizer.push((byte_id(0xFF),)) == "\ufffd"
    assert detokenizer.push((byte_id(0xE6),)) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(("skip", "text"), [(True, "hello"), (False, "hello<|im_end|>")])
def test_control_tokens_are_shown_only_when_asked_for(skip: bool, text: str) -> None:
    ids = BYTE_LEVEL.encode("hello<|im_end|>", add_special_tokens=False)
    assert Detokenizer(BYTE_LEVEL, skip_special_tokens=skip).push(ids) == text


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    """A model's embedding may be padded; what it samples there must not fail the request."""
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    assert detokenizer.push((byte_id(ord("a")), BYTE_LEVEL.vocab_size + 5, byte_id(ord("b")))) == "ab"


def test_the_first_space_belongs_to_a_continuation() -> None:
    """SentencePiece puts a space before a text; what a model continues with does begin with that space."""
    ids = SENTENCEPIECE.encode("octavo", add_special_tokens=False)
    assert Detokenizer(SENTENCEPIECE, skip_special_tokens=True).push(ids) == " octavo"
    assert Detokenizer(SENTENCEPIECE, skip_special_tokens=True, continuation=False).push(ids) == "octavo"
    for item in sentencepiece_golden()["items"]:
        detokenizer = Detokenizer(SENTENCEPIECE, skip_special_tokens=True, continuation=False)
        assert "".join(pushed(detokenizer, item["ids"], [1] * len(item["ids"]))) == item["decoded"]
