"""Text to token ids and back. Knows nothing of chats, requests or the model's weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError
from octavo.text.guard import MARK, ControlTextGuard
from octavo.text.vocabulary import UNBOUNDED, Vocabulary

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import normalizers

_QUICK_CHARACTERS = 1 << 11
"""Texts up to this length are encoded with the GIL held, which takes about a millisecond at most."""
_PART_CHARACTERS = 1 << 16
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_WORD_BORDER = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")


class Tokenizer:
    """A model's tokenizer. Immutable; all methods may be called from any thread, and encoding releases the GIL.

    pieces: the bytes of each id. visible_pieces: the same with nothing for control tokens. vocab_size: ids from 0 to
    vocab_size - 1 are known; a model may compute logits for more (padding), which are no tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.pieces = vocabulary.pieces
        special = vocabulary.special_ids
        self.visible_pieces = tuple([b"" if index in special else piece for index, piece in enumerate(self.pieces)])
        self._showing: dict[frozenset[int], tuple[bytes, ...]] = {frozenset(): self.visible_pieces}
        self.vocab_size = len(self.pieces)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.adds_leading_space = vocabulary.adds_leading_space
        backend = vocabulary.backend
        self._added = sorted(backend.get_added_tokens_decoder().items())
        self.special_tokens: Mapping[str, int] = {
            token.content: index for index, token in self._added if index in special
        }
        self._whole = _Encoder(backend, self._added, vocabulary.word_cuts)
        self._plain = _Encoder(_copy(backend, self._added, backend.normalizer), self._added, vocabulary.word_cuts)
        self._plain.backend.encode_special_tokens = True
        self._chat_guard: tuple[str, ControlTextGuard] | None = None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, cache: Path | None = None) -> Tokenizer:
        """The tokenizer described by a GGUF file's metadata.

        `cache`: a folder for tokenizers that take seconds to derive (SentencePiece kinds with large vocabularies).
        Raises ModelFileError, UnsupportedModelError naming a kind or pre-tokenizer that is not implemented.
        """
        from octavo.text import gguf_vocabulary

        return cls(gguf_vocabulary.read(metadata, cache))

    @classmethod
    def from_hf(
        cls,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: the files' contents, {} for those that are absent.

        Raises ModelFileError, UnsupportedModelError.
        """
        from octavo.text import hf_vocabulary

        return cls(hf_vocabulary.read(tokenizer_json, tokenizer_config, generation_config, config))

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def adds_bos(self) -> bool:
        """Whether a text's ids begin with BOS."""
        return self.bos_token_id is not None and self.bos_token_id in self._vocabulary.prefix_ids

    @property
    def bos_token(self) -> str:
        """Text of the BOS token, "" without one. For chat templates."""
        return "" if self.bos_token_id is None else self.token_text(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """Text of the first end token, "" without one. For chat templates."""
        return self.token_text(self.eos_token_ids[0]) if self.eos_token_ids else ""

    @cached_property
    def max_token_characters(self) -> int:
        """Most characters of text that one token can stand for: a text of n times as many has at least n tokens.

        Characters that the vocabulary cannot spell at all, which encoding leaves out, do not count (SmolLM2's has no U+0004).
        """
        vocabulary = self._vocabulary
        if vocabulary.unknown_id is not None or vocabulary.shrink >= UNBOUNDED:
            return UNBOUNDED
        longest = 0
        for piece in self.pieces:
            if len(piece) > longest:  # in bytes, which are no fewer than its characters
                # The characters that begin in the token, and one that begins before it.
                characters = len(piece.translate(None, _CONTINUATION_BYTES)) + (piece[:1] in _CONTINUATION_BYTES)
                longest = max(longest, characters)
        return longest * vocabulary.shrink

    def pieces_showing(self, texts: Sequence[str]) -> tuple[bytes, ...]:
        """`visible_pieces`, but with the control tokens of these texts."""
        shown = frozenset(self.special_tokens[text] for text in texts if text in self.special_tokens)
        pieces = self._showing.get(shown)
        if pieces is None:
            changed = list(self.visible_pieces)
            for token in shown:
                changed[token] = self.pieces[token]
            pieces = self._showing[shown] = tuple(changed)
        return pieces

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token (or the unknown token)."""
        return token_id in self._vocabulary.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; of a control token, those of its text. Raises InvalidRequestError for no token."""
        self._check(token_id)
        return self.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """A token for display: its bytes as text, U+FFFD for parts of characters. Raises InvalidRequestError for no token."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # --- encoding ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of a text, in time linear in its length.

        `add_special_tokens` puts BOS (and EOS) around it where the model was trained so; a text that already begins with
        BOS gets no second one. `parse_special`: texts of control tokens become these tokens; without it they are text
        like any other, which is the way to encode what users write.
        Raises InvalidRequestError for lone surrogates, which have no UTF-8 form.
        """
        _check_unicode(text)
        ids = (self._whole if parse_special else self._plain).encode(text)
        if not parse_special:
            self._refuse_forged(ids)
        if add_special_tokens:
            ids = [*self._missing_prefix(ids), *ids, *self._vocabulary.suffix_ids]
        return ids

    def encode_chat(self, text: str, *, marked: bool = False) -> list[int]:
        """The ids of a conversation rendered by a chat template: exactly one BOS if the model has one at all, no EOS added.

        `marked`: the text holds control-token texts broken up by marks (see `ControlTextGuard`), which are encoded as text.
        Raises InvalidRequestError for lone surrogates, or if such a text cannot be spelled by other tokens.
        """
        _check_unicode(text)
        ids = self._marked.encode(text) if marked else self._whole.encode(text)
        return [*self._missing_prefix(ids), *ids]

    @cached_property
    def control_guard(self) -> ControlTextGuard:
        """Finds the texts of control tokens."""
        return ControlTextGuard(self.special_tokens)

    def chat_guard(self, template_source: str) -> ControlTextGuard:
        """Finds the texts of control tokens and of those user-defined tokens that a chat template writes (<tool_call>)."""
        if self._chat_guard is None or self._chat_guard[0] != template_source:
            written = [
                token.content
                for _, token in self._added
                if not token.special and token.content.strip() and token.content in template_source
            ]
            guard = ControlTextGuard([*self.special_tokens, *written]) if written else self.control_guard
            self._chat_guard = (template_source, guard)
        return self._chat_guard[1]

    @cached_property
    def _marked(self) -> _Encoder:
        """As `_whole`, but marks vanish once control tokens have been found."""
        from tokenizers import normalizers

        own = self._vocabulary.backend.normalizer
        unmark = normalizers.Replace(MARK, "")
        backend = _copy(
            self._vocabulary.backend, self._added, unmark if own is None else normalizers.Sequence([unmark, own])
        )
        encoder = _Encoder(backend, self._added, self._vocabulary.word_cuts)
        for text in self.special_tokens:
            if len(text) > 1:
                self._refuse_forged(encoder.encode(text[0] + MARK + text[1:]))
        return encoder

    def _refuse_forged(self, ids: Sequence[int]) -> None:
        """A vocabulary in which ordinary text becomes control tokens cannot keep users from writing them."""
        forged = self._vocabulary.special_ids.intersection(ids) - {self._vocabulary.unknown_id}
        if forged:
            raise InvalidRequestError(
                f"the text of {self.token_text(min(forged))!r} cannot be spelled by other tokens of this model: remove it"
            )

    def _missing_prefix(self, ids: Sequence[int]) -> tuple[int, ...]:
        prefix = self._vocabulary.prefix_ids
        return () if prefix and list(ids[: len(prefix)]) == list(prefix) else prefix

    # --- decoding ---------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, continuation: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD.

        `continuation`: the ids continue other text, so that a first space belongs to it (see `Detokenizer`).
        Raises InvalidRequestError for ids that are no tokens.
        """
        pieces = self.visible_pieces if skip_special_tokens else self.pieces
        if ids and (min(ids) < 0 or max(ids) >= len(pieces)):
            self._check(min(ids))
            self._check(max(ids))
        data = b"".join([pieces[index] for index in ids])
        if self.adds_leading_space and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"token id {token_id!r:.40} is not known; ids are 0 to {self.vocab_size - 1}")


class _Encoder:
    """A backend whose ids are the model's, and that takes long text in parts so that memory stays small.

    Added tokens beyond a model's base vocabulary are numbered by the library as they come; `_renumber` corrects that.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, added: Sequence[tuple[int, tokenizers.AddedToken]], word_cuts: bool
    ) -> None:
        self.backend = backend
        self._renumber = {
            number: index
            for index, token in added
            if (number := backend.token_to_id(token.content)) is not None and number != index
        }
        self._word_cuts = word_cuts

    def encode(self, text: str) -> list[int]:
        if len(text) <= _QUICK_CHARACTERS:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        else:
            ids = []
            for part in self._parts(text):
                # Of the library's calls only those for batches release the GIL.
                ids += self.backend.encode_batch_fast([part], add_special_tokens=False)[0].ids
        if self._renumber:
            ids = [self._renumber.get(index, index) for index in ids]
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        if self._word_cuts:
            while len(text) - start > _PART_CHARACTERS:
                border = _WORD_BORDER.search(text, start + _PART_CHARACTERS)
                if border is None:
                    break
                yield text[start : border.start()]
                start = border.start()
        yield text[start:] if start else text


def _copy(
    backend: tokenizers.Tokenizer,
    added: Sequence[tuple[int, tokenizers.AddedToken]],
    normalizer: normalizers.Normalizer | None,
) -> tokenizers.Tokenizer:
    """The same tokenizer with another normalizer. The vocabulary is shared, so this costs next to nothing."""
    from tokenizers import Tokenizer as Backend

    copy = Backend(backend.model)
    if normalizer is not None:
        copy.normalizer = normalizer
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    copy.add_tokens([token for _, token in added])
    return copy


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds half of a surrogate pair at character {error.start}; send the whole character or U+FFFD"
        ) from error
