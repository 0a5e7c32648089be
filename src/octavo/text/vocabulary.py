"""What a tokenizer is made of, wherever it was read from. Knows no file formats and no recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ModelFileError

if TYPE_CHECKING:
    import tokenizers

UNBOUNDED = 2**40
"""Stands for "no bound known" where a number of characters is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything `Tokenizer` needs.

    backend: turns text into ids; all added tokens (control tokens and user-defined ones) are registered in it, its
    post-processor is not used. pieces: the bytes each id stands for, b"" for ids that stand for no text.
    special_ids: control tokens and the unknown token. unknown_id: the latter, None when every text can be spelled.
    prefix_ids, suffix_ids: what belongs around a text (BOS, EOS). adds_leading_space: a space is put before each text and
    taken away on decoding. word_cuts: text may be encoded in parts, cut before a space between two ASCII letters.
    shrink: characters of text that normalization may turn into one at most.
    """

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    unknown_id: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    adds_leading_space: bool
    word_cuts: bool
    shrink: int = 1


def byte_level_alphabet() -> str:
    """The character that stands for each byte, 0..255, in byte-level vocabularies.

    Printable Latin-1 stands for itself, the other bytes for U+0100 and on. Source: GPT-2, encoder.py, bytes_to_unicode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


def checked_id(value: object, name: str, vocab_size: int) -> int | None:
    """A token id from a model file, None when absent. Raises ModelFileError when it is none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelFileError(f"{name} is {value!r:.40}, expected a token id below {vocab_size}", param=name)
    return value
