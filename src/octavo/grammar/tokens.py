"""The vocabulary as llguidance sees it: bytes of each token, control tokens, ends, and how a text is spelled. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec


class TokenTable(msgspec.Struct, frozen=True, kw_only=True):
    """A vocabulary: what each id stands for, which are control tokens, and which of them end an output."""

    pieces: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


Spell = Callable[[str], Sequence[int]]
"""The ids a model would expect of a text in the middle of others. Texts that cannot be spelled give ids of another text, or none."""


def make_tokenizer(table: TokenTable, spell: Spell) -> Any:
    """An `LLTokenizer`. Takes 0.1 to 0.2 s for 50,000 tokens, with the GIL held."""
    from llguidance import LLTokenizer

    return LLTokenizer(
        _Wrapper(table, spell),  # type: ignore[arg-type]  # a TokenizerWrapper by its attributes
        eos_token=list(table.eos_ids),
        slices=LLTokenizer.json_slices(),
    )


class _Wrapper:
    """llguidance's protocol of a tokenizer.

    What is forced (a property's name) is allowed in its usual spelling only. A spelling that is none, such as that of a text which
    holds a control token's, is replaced by the longest pieces.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, spell: Spell) -> None:
        self.tokens = table.pieces
        self.special_token_ids = table.special_ids
        self.eos_token_id = table.eos_ids[0]
        self._spell = spell
        self._ids: dict[bytes, int] = {}
        special = frozenset(table.special_ids)
        for token, piece in enumerate(table.pieces):
            if piece and token not in special:
                self._ids.setdefault(piece, token)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        ids = list(self._spell(text))
        data = text.encode("utf-8", "surrogatepass")
        return ids if b"".join(self.tokens[token] for token in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (token := self._ids.get(data[start:end])) is not None:
                    ids.append(token)
                    start = end
                    break
            else:  # a byte without a token: what follows cannot be spelled
                break
        return ids
