"""Vocabularies from the metadata of GGUF files: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Source: docs/gguf.md of ggml-org/ggml for the keys; llama.cpp (llama-vocab.cpp) for the defaults of absent keys.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.text.pretokenizers import split_named
from octavo.text.vocabulary import Vocabulary, byte_level_alphabet, checked_id

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger("octavo")

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"
"""How SentencePiece writes a space."""

CACHE_RECIPE = 1
"""Raised whenever the same metadata gives another tokenizer, so that cached ones are not taken."""

TURN_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
        "<EOT>", "_<EOT>", "<|eot|>",
    }
)  # fmt: skip
"""Control tokens that end a text or turn, in any model that has them. A file's keys name only one or two of a model's."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL = frozenset({TokenType.UNKNOWN, TokenType.CONTROL})


def read(metadata: Mapping[str, Any], cache: Path | None) -> Vocabulary:
    """The vocabulary of a GGUF file. `cache`: folder for tokenizers that take long to build, None for no cache.

    Raises ModelFileError for damaged metadata, UnsupportedModelError for kinds that are not implemented.
    """
    kind = metadata.get(f"{PREFIX}model")
    if kind is None:
        raise ModelFileError("the file holds no tokenizer", param=f"{PREFIX}model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"tokenizer kind {kind!r:.40} is not supported; supported are gpt2 and llama", param=f"{PREFIX}model"
        )
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise ModelFileError("the tokenizer has no tokens", param=f"{PREFIX}tokens")
    types = metadata.get(f"{PREFIX}token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFileError(f"{len(types)} token types for {len(tokens)} tokens", param=f"{PREFIX}token_type")
    build = _byte_level if kind == "gpt2" else _sentencepiece
    return build(metadata, tokens, types, cache)


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], cache: Path | None
) -> Vocabulary:
    """Built in tens of milliseconds, so `cache` is not used."""
    split = split_named(str(metadata.get(f"{PREFIX}pre", "default")))
    backend = _bpe(_ids(tokens), _merges(metadata) or [], ignore_merges=split.ignore_merges)
    backend.pre_tokenizer = split.build()
    _add_tokens(backend, tokens, types)
    to_bytes = codecs.charmap_build(byte_level_alphabet())

    def piece(token: str, kind: int) -> bytes:
        if kind == TokenType.UNUSED:
            # Filler up to the size of the embedding, such as [PAD151936]: it stands for no text.
            return b""
        if kind == TokenType.NORMAL:
            try:
                return codecs.charmap_encode(token, "strict", to_bytes)[0]
            except UnicodeEncodeError:
                pass
        return _utf8(token)

    pieces = tuple([piece(token, kind) for token, kind in zip(tokens, types, strict=True)])
    return _vocabulary(
        metadata,
        tokens,
        types,
        backend,
        pieces,
        adds_bos=split.adds_bos,
        adds_leading_space=False,
        word_cuts=not any(" " in tokens[index] for index in _added_ids(tokens, types)),
    )


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], cache: Path | None
) -> Vocabulary:
    """SentencePiece's BPE, spelled for a merge-list BPE.

    SentencePiece always joins the neighbours whose joint piece has the best score. Its trainer numbers pieces in the order
    in which it finds them, with scores falling by one each, so merging by the position of the joint piece is the same;
    and it stays right where a converter gave user-defined pieces scores that lie outside that order (Gemma). Compared with
    sentencepiece 0.2.3 itself: equal ids on 9,000 random texts over three trained vocabularies of 1,000 to 4,000 pieces.

    The space before a text (`add_space_prefix`) is put before each stretch of text between control tokens, as Llama 2's
    tokenizer.json and llama.cpp do.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    # Runs of spaces are stored as such, but merging sees SentencePiece's spelling.
    tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    adds_space = bool(metadata.get(f"{PREFIX}add_space_prefix", True))
    unknown = checked_id(metadata.get(f"{PREFIX}unknown_token_id"), f"{PREFIX}unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((index for index, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)

    def build() -> tokenizers.Tokenizer:
        merges = _merges(metadata)
        return _bpe(
            _ids(tokens),
            merges if merges is not None else _derived_merges(tokens, types),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )

    derived = f"{PREFIX}merges" not in metadata
    backend = _cached(build, cache if derived else None, (tokens, list(types), unknown))
    spell = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if adds_space else spell
    all_bytes = sum(kind == TokenType.BYTE for kind in types) == 256
    if all_bytes and not any(re.search(f"[^{SPACE}]{SPACE}", token) for token in tokens):
        # No piece reaches into a following word, so words can be merged on their own: same ids, much faster.
        words = Regex(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
        backend.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    _add_tokens(backend, tokens, types)

    def piece(token: str, kind: int) -> bytes:
        if kind == TokenType.BYTE:
            return _byte(token)
        return _utf8(token if kind in _SPECIAL else token.replace(SPACE, " "))

    return _vocabulary(
        metadata,
        tokens,
        types,
        backend,
        tuple([piece(token, kind) for token, kind in zip(tokens, types, strict=True)]),
        adds_bos=True,
        adds_leading_space=adds_space,
        word_cuts=False,
        unknown=unknown,
        spells_everything=all_bytes,
    )


def _vocabulary(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    backend: tokenizers.Tokenizer,
    pieces: tuple[bytes, ...],
    *,
    adds_bos: bool,
    adds_leading_space: bool,
    word_cuts: bool,
    unknown: int | None = None,
    spells_everything: bool = True,
) -> Vocabulary:
    """What both kinds share: the special ids. `adds_bos` is the default of files that do not say."""

    def named(name: str) -> int | None:
        key = f"{PREFIX}{name}_token_id"
        return checked_id(metadata.get(key), key, len(tokens))

    bos, eos = named("bos"), named("eos")
    ends = [end for end in (eos, named("eot"), named("eom")) if end is not None]
    ends += [
        index
        for index, kind in enumerate(types)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and tokens[index] in TURN_ENDS
    ]
    puts_bos = bos is not None and bool(metadata.get(f"{PREFIX}add_bos_token", adds_bos))
    puts_eos = eos is not None and bool(metadata.get(f"{PREFIX}add_eos_token", False))
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(index for index, kind in enumerate(types) if kind in _SPECIAL),
        unknown_id=None if spells_everything else unknown,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        prefix_ids=(bos,) if bos is not None and puts_bos else (),
        suffix_ids=(eos,) if eos is not None and puts_eos else (),
        adds_leading_space=adds_leading_space,
        word_cuts=word_cuts,
    )


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(
            f"the tokenizer's merges do not fit its tokens: {error}", param=f"{PREFIX}merges"
        ) from error


def _added_ids(tokens: Sequence[str], types: Sequence[int]) -> Iterable[int]:
    """Tokens that are recognised in text as a whole. Runs of spaces are not among them: merging finds those."""
    for index, kind in enumerate(types):
        if kind in _SPECIAL or (kind == TokenType.USER_DEFINED and tokens[index].strip(SPACE)):
            yield index


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(tokens[index], normalized=False, special=types[index] in _SPECIAL)
            for index in _added_ids(tokens, types)
            if tokens[index]
        ]
    )


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """Text to id. Of tokens with the same text the first one is used."""
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        ids = {token: index for index, token in reversed(list(enumerate(tokens)))}
    return ids


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"{PREFIX}{name}", [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelFileError(f"{PREFIX}{name} must be a list of strings", param=f"{PREFIX}{name}")
    return value


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """The file's merges, None when it has none. Two parts, separated by the first space that is not itself a part."""
    if f"{PREFIX}merges" not in metadata:
        return None
    stored = _strings(metadata, "merges")
    merges = [(merge[:at], merge[at + 1 :]) for merge in stored if (at := merge.find(" ", 1)) > 0]
    if len(merges) != len(stored):
        raise ModelFileError("not every merge is two tokens with a space between", param=f"{PREFIX}merges")
    return merges


def _derived_merges(tokens: Sequence[str], types: Sequence[int]) -> list[tuple[str, str]]:
    """All ways to put each piece together from two others, in the order of the pieces."""
    ids: dict[str, int] = {}
    for index, kind in enumerate(types):
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED):
            ids.setdefault(tokens[index], index)
    merges = []
    for token in ids:
        ways = []
        for at in range(1, len(token)):
            left = ids.get(token[:at])
            if left is not None and (right := ids.get(token[at:])) is not None:
                ways.append((left, right))
        merges += [(tokens[left], tokens[right]) for left, right in sorted(ways)]
    return merges


def _byte(token: str) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    if match is None:
        raise ModelFileError(f"byte token {token!r:.20} is not of the form <0xNN>", param=f"{PREFIX}tokens")
    return bytes.fromhex(match[1])


def _utf8(token: str) -> bytes:
    return token.encode("utf-8", "replace")


def _cached(
    build: Callable[[], tokenizers.Tokenizer], cache: Path | None, key: Sequence[object]
) -> tokenizers.Tokenizer:
    """What `build` gives, from the cache when it was built for an equal key before.

    A file is a SHA-256 of its body, a newline, the body; anything else is not believed and built anew. Files appear whole.
    """
    if cache is None:
        return build()
    import tokenizers

    digest = hashlib.sha256(msgspec.json.encode([CACHE_RECIPE, tokenizers.__version__, *key])).hexdigest()
    path = cache / f"tokenizer-{digest}.json"
    try:
        checksum, _, body = path.read_bytes().partition(b"\n")
        if checksum == hashlib.sha256(body).hexdigest().encode():
            return tokenizers.Tokenizer.from_str(body.decode())
        _log.warning("cached tokenizer %s is damaged and is built anew", path.name)
    except FileNotFoundError:
        pass
    except Exception as error:  # noqa: BLE001 - a cache must not stop the model, and the library raises plain Exception
        _log.warning("cached tokenizer %s cannot be read and is built anew: %s", path.name, error)
    backend = build()
    body = backend.to_str().encode()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, prefix=path.name, delete=False) as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        Path(file.name).replace(path)
    except OSError as error:
        _log.warning("the tokenizer cannot be cached in %s: %s", cache, error)
    return backend
