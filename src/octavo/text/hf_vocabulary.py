"""Vocabularies from Hugging Face's tokenizer.json and the configuration files beside it."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.text.pretokenizers import KNOWN_PATTERNS
from octavo.text.vocabulary import UNBOUNDED, Vocabulary, byte_level_alphabet, checked_id

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"
_PROBE = "a"


def read(
    tokenizer_json: bytes,
    tokenizer_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Vocabulary:
    """The vocabulary of a model folder. The other files give BOS, end tokens and whether BOS is put before a text.

    Raises ModelFileError for damaged files, UnsupportedModelError for a decoder that is not implemented.
    """
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(tokenizer_json.decode())
        description = json.loads(tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(f"tokenizer.json cannot be read: {error}", param="tokenizer.json") from error
    backend.no_truncation()
    backend.no_padding()
    added = backend.get_added_tokens_decoder()
    decoders = list(_flat(description.get("decoder"), "decoders"))
    pieces = _pieces(backend, {index: token.content for index, token in added.items()}, decoders)
    bos = _token_id(backend, tokenizer_config, "bos_token")
    prefix, suffix = _around(backend)
    adds_bos = tokenizer_config.get("add_bos_token")
    if isinstance(adds_bos, bool) and bos is not None:
        prefix = (
            (bos, *(token for token in prefix if token != bos))
            if adds_bos
            else tuple(token for token in prefix if token != bos)
        )
    model = description.get("model", {})
    spells_everything = bool(model.get("byte_fallback")) and all(
        backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )
    unknown = None if spells_everything else model.get("unk_token")
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(index for index, token in added.items() if token.special),
        unknown_id=None if unknown is None else backend.token_to_id(unknown),
        bos_token_id=bos,
        eos_token_ids=_ends(backend, tokenizer_config, generation_config, config, len(pieces)),
        prefix_ids=prefix,
        suffix_ids=suffix,
        adds_leading_space=any(
            (decoder["type"] == "Strip" and decoder.get("content") == " " and decoder.get("start") == 1)
            or (decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never")
            for decoder in decoders
        ),
        word_cuts=_word_cuts(description, added),
        shrink=_shrink(description),
    )


def _flat(node: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a component, sequences unfolded."""
    if node is None:
        return
    if node.get("type") == "Sequence":
        for part in node.get(name, ()):
            yield from _flat(part, name)
    else:
        yield node


def _pieces(
    backend: tokenizers.Tokenizer, added: Mapping[int, str], decoders: list[Mapping[str, Any]]
) -> tuple[bytes, ...]:
    kinds = {decoder["type"] for decoder in decoders}
    texts = {index: text for text, index in backend.get_vocab(with_added_tokens=False).items()}
    size = max([*texts, *added], default=-1) + 1
    if kinds == {"ByteLevel"}:
        to_bytes = codecs.charmap_build(byte_level_alphabet())

        def piece(text: str) -> bytes:
            try:
                return codecs.charmap_encode(text, "strict", to_bytes)[0]
            except UnicodeEncodeError:
                return text.encode("utf-8", "replace")

    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaced = [decoder for decoder in decoders if decoder["type"] == "Replace"]
        if any(item.get("pattern") != {"String": _SPACE} or item.get("content") != " " for item in replaced):
            raise UnsupportedModelError("tokenizer.json: this Replace decoder is not supported", param="tokenizer.json")

        def piece(text: str) -> bytes:
            if "ByteFallback" in kinds and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
                return bytes.fromhex(match[1])
            return text.replace(_SPACE, " ").encode("utf-8", "replace")

    else:
        raise UnsupportedModelError(
            f"tokenizer.json: decoder {', '.join(sorted(kinds)) or 'null'} is not supported; "
            "supported are byte-level and SentencePiece decoders",
            param="tokenizer.json",
        )
    return tuple(
        added[index].encode("utf-8", "replace") if index in added else piece(texts[index]) if index in texts else b""
        for index in range(size)
    )


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    bare = backend.encode(_PROBE, add_special_tokens=False).ids
    whole = backend.encode(_PROBE, add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise UnsupportedModelError(
        "tokenizer.json: its post-processor changes the tokens of the text itself", param="tokenizer.json"
    )


def _token_id(backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], name: str) -> int | None:
    token = tokenizer_config.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _ends(
    backend: tokenizers.Tokenizer,
    tokenizer_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    config: Mapping[str, Any],
    vocab_size: int,
) -> tuple[int, ...]:
    """The tokenizer's own end token and those of generation_config.json, or where that names none, of config.json."""
    ends = []
    own = _token_id(backend, tokenizer_config, "eos_token")
    if own is not None:
        ends.append(own)
    for name, source in (("generation_config.json", generation_config), ("config.json", config)):
        named = source.get("eos_token_id")
        if named is None:
            continue
        for token in named if isinstance(named, list) else [named]:
            checked = checked_id(token, f"eos_token_id in {name}", vocab_size)
            if checked is not None:
                ends.append(checked)
        break
    return tuple(dict.fromkeys(ends))


def _word_cuts(description: Mapping[str, Any], added: Mapping[int, tokenizers.AddedToken]) -> bool:
    """Whether every piece is known to end before a space between two ASCII letters."""
    parts = list(_flat(description.get("pre_tokenizer"), "pretokenizers"))
    byte_levels = [part for part in parts if part["type"] == "ByteLevel"]
    patterns = [part.get("pattern", {}).get("Regex") for part in parts if part["type"] == "Split"]
    return (
        len(byte_levels) == 1
        and not byte_levels[0].get("add_prefix_space")
        and (byte_levels[0].get("use_regex", True) if not patterns else KNOWN_PATTERNS.issuperset(patterns))
        and all(part["type"] in ("ByteLevel", "Split", "Digits") for part in parts)
        and _shrink(description) < UNBOUNDED
        and not any(
            " " in token.content or token.lstrip or token.rstrip or token.single_word for token in added.values()
        )
    )


def _shrink(description: Mapping[str, Any]) -> int:
    """How many characters of text the normalizer may turn into one."""
    most = 1
    for part in _flat(description.get("normalizer"), "normalizers"):
        if part["type"] == "NFC":
            # At most a base with three marks, by Unicode's composition tables.
            most = max(most, 4)
        elif part["type"] == "Prepend" or (part["type"] == "Replace" and part.get("pattern") == {"String": " "}):
            continue
        else:
            return UNBOUNDED
    return most
