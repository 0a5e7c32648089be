"""The default model's vocabulary as grammars see it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from octavo.grammar.tokens import Spell, TokenTable
from octavo.loaders.checkpoint import open_checkpoint
from octavo.text.tokenizer import Tokenizer


@cache
def tokenizer_of(model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(str(model)).metadata)


def table_of(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(
        pieces=tokenizer.pieces,
        special_ids=tuple(tokenizer.special_tokens.values()),
        eos_ids=tokenizer.eos_token_ids,
    )


def spell_of(tokenizer: Tokenizer) -> Spell:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
