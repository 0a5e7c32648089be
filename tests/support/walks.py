"""Random outputs that a grammar allows, drawn token by token without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from octavo.grammar.limits import parser_limits

_CLOSING = frozenset((b'"', b"<", b"}", b"\n", b")", b"]"))


def matcher_of(tokenizer: Any, source: str) -> Any:
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(
    tokenizer: Any,
    pieces: Sequence[bytes],
    eos: int,
    source: str,
    seed: int,
    *,
    endings: Sequence[bytes] = (),
    most_tokens: int = 3000,
) -> str:
    """An output drawn to its end. It leans to characters that close something, and at times writes one of the `endings`, byte by byte."""
    rng = random.Random(seed)
    matcher = matcher_of(tokenizer, source)
    data = b""
    planned: list[int] = []
    for step in range(most_tokens):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        options = np.flatnonzero(bits[: len(pieces)]).tolist()
        assert options, data
        if eos in options and (rng.random() < 0.5 or options == [eos] or step > most_tokens // 8):
            return data.decode()
        options = [token for token in options if token != eos]
        closing = [token for token in options if pieces[token] in _CLOSING]
        visible = [token for token in options if len(pieces[token]) > 1 or 32 <= pieces[token][0] < 127]
        token = rng.choice(closing if closing and rng.random() < 0.4 else visible or options)
        if endings and not planned and rng.random() < 0.1:
            planned = list(rng.choice(endings))
        if planned:
            following = planned.pop(0)
            if following in options:
                token = following
            else:
                planned.clear()
        assert matcher.consume_token(token)
        data += pieces[token]
    raise AssertionError(f"no end: {data!r:.200}")
