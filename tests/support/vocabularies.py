"""Small tokenizers for tests of text: byte-level and SentencePiece from GGUF metadata, and Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import byte_level_alphabet

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
GOLDEN = Path(__file__).parents[1] / "golden"

MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "1 2")
CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>")
USER_DEFINED_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def byte_level_metadata(
    *,
    pre: str = "gpt-2",
    merges: Sequence[str] = MERGES,
    controls: Sequence[str] = CONTROLS,
    user_defined: Sequence[str] = USER_DEFINED_TOKENS,
    **changes: Any,
) -> dict[str, Any]:
    """GGUF metadata: 256 bytes (ids 0..255), the merges' results, control tokens, user-defined ones, one unused id."""
    tokens = [*byte_level_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens)
    tokens += [*controls, *user_defined, "[PAD7]"]
    types += [CONTROL] * len(controls) + [USER_DEFINED] * len(user_defined) + [UNUSED]
    ids = {token: index for index, token in enumerate(tokens)}
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": list(merges),
        "bos_token_id": ids.get("<s>"),
        "eos_token_id": ids.get("</s>"),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


def byte_level(**changes: Any) -> Tokenizer:
    """The tokenizer of `byte_level_metadata`."""
    return Tokenizer.from_gguf(byte_level_metadata(**changes))


def sentencepiece_golden() -> dict[str, Any]:
    """A tiny SentencePiece vocabulary and SentencePiece's own encodings (scripts/make_sentencepiece_golden.py)."""
    golden: dict[str, Any] = json.loads((GOLDEN / "sentencepiece-tiny.json").read_text())
    return golden


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of that vocabulary; ids 0, 1, 2 are <unk>, <s>, </s>."""
    golden = sentencepiece_golden()
    metadata = {
        "model": "llama",
        **{name: golden[name] for name in ("tokens", "scores", "token_type")},
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


def hf_byte_level(*, pattern: str | None = None, bos_by_processor: bool = True, nfc: bool = False) -> bytes:
    """A tokenizer.json like Llama 3's or Qwen 2's: control tokens lie beyond the base vocabulary, with an id left out."""
    vocab = {token: index for index, token in enumerate(byte_level_alphabet())}
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    backend = Backend(models.BPE(vocab, [tuple(merge.split(" ")) for merge in MERGES]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = (
        byte_level
        if pattern is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    )
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in USER_DEFINED_TOKENS])
    if bos_by_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return backend.to_str().encode()


def hf_sentencepiece() -> bytes:
    """A tokenizer.json like Llama 2's, with the vocabulary of `sentencepiece_golden`."""
    golden = sentencepiece_golden()
    from octavo.text.gguf_vocabulary import _derived_merges

    merges = _derived_merges(golden["tokens"], golden["token_type"])
    vocab = {token: index for index, token in enumerate(golden["tokens"])}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return backend.to_str().encode()
