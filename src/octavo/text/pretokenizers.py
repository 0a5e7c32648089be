"""How byte-level vocabularies split text before merging, by the names GGUF files use.

Sources: the tokenizer.json files of the models; the names and their grouping are those of llama.cpp (llama-vocab.cpp), as of 2026-08.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS_SLASH_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS_AND_SPACES}"
TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_MARKS_SLASH_AND_SPACES}"
GPT4O = rf"{_LOWER_WORD}{_CONTRACTIONS}?|{_UPPER_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_MARKS_SLASH_AND_SPACES}"

KNOWN_PATTERNS = frozenset({LLAMA3, QWEN2, TEKKEN, GPT4O})
"""All of them end a piece before a space between two letters, whatever stands around."""


@dataclass(frozen=True, slots=True)
class Split:
    """pattern: what a piece looks like, None for GPT-2's own. digits: each digit is a piece, before all else.

    ignore_merges: a piece that is a token as a whole stays one, even if no merges lead to it. adds_bos: the default of
    files that do not say.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer."""
        from tokenizers import Regex, pre_tokenizers

        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        before: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            before.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            before.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        return pre_tokenizers.Sequence([*before, byte_level])


_SPLITS: dict[Split, tuple[str, ...]] = {
    Split(): (
        "default", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
        "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4",
    ),
    Split(digits=True): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    Split(LLAMA3, ignore_merges=True, adds_bos=True): (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    Split(LLAMA3): ("dbrx", "smaug-bpe"),
    Split(QWEN2): ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"),
    Split(TEKKEN, ignore_merges=True, adds_bos=True): ("tekken",),
    Split(GPT4O): ("gpt-4o", "llama4", "kanana2", "talkie"),
}  # fmt: skip
_BY_NAME = {name: split for split, names in _SPLITS.items() for name in names}


def split_named(name: str) -> Split:
    """The split of a `tokenizer.ggml.pre` value. Raises UnsupportedModelError, naming it, for one that is not known."""
    split = _BY_NAME.get(name)
    if split is None:
        raise UnsupportedModelError(
            f"pre-tokenizer {name!r:.60} is not supported; supported are {', '.join(sorted(_BY_NAME))}",
            param="tokenizer.ggml.pre",
        )
    return split
