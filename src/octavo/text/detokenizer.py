"""Incremental detokenization: token ids of one sequence in, text out. Knows nothing of stop strings or requests."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the tokens of one sequence into text as they come.

    A character split over tokens is held back until it is whole, so U+FFFD appears only for bytes that can no longer
    become a character. All pushes and `flush` joined are `Tokenizer.decode` of all ids at once, whatever the cuts.

    `continuation`: the tokens continue other text (a prompt), so a first space is part of the text. Without it the space
    that a SentencePiece tokenizer puts before a text is taken away again; byte-level tokenizers have none. `shown`: control tokens
    that are text nevertheless.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, continuation: bool = True, shown: Sequence[str] = ()
    ) -> None:
        self._pieces = tokenizer.pieces_showing(shown) if skip_special_tokens else tokenizer.pieces
        self._decode = _utf8_decoder("replace").decode
        self._strip = tokenizer.adds_leading_space and not continuation

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens. Ids beyond the vocabulary (padding of the model's) have no text."""
        pieces = self._pieces
        try:
            data = b"".join([pieces[token] for token in token_ids])
        except IndexError:
            data = b"".join([pieces[token] for token in token_ids if token < len(pieces)])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def flush(self) -> str:
        """The sequence has ended: the replacement of an unfinished character, if there is one."""
        return self._decode(b"", final=True)
