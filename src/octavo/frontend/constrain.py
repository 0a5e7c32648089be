"""Between requests and the engine: grammars are compiled before anything runs, and vocabularies are shown to grammars.

Knows no HTTP. Waiting is the caller's: a future per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.frontend.requests import Prepared
from octavo.limits import MAX_GRAMMAR_COPIES_BYTES

if TYPE_CHECKING:
    from octavo.config import StructuredConfig
    from octavo.frontend.model import ServedModel
    from octavo.grammar.tokens import Spell, TokenTable
    from octavo.text.tokenizer import Tokenizer


class GrammarDoor:
    """Compiles what requests are constrained by. All methods may be called from any thread."""

    def __init__(self, model: ServedModel, config: StructuredConfig) -> None:
        from octavo.grammar.compiler import GrammarCompiler
        from octavo.grammar.limits import Limits

        self._model = model
        limits = Limits(compile_s=config.grammar_timeout)
        self._compiler = GrammarCompiler(lambda: token_table(model.tokenizer, model.eos_token_ids), limits)

    def begin(self, prepared: Prepared) -> Future[str] | None:
        """The source of a request's grammar, in a future; None for a request without. Raises and fails as `GrammarCompiler.compile`."""
        spec = prepared.grammar
        if spec is None:
            return None
        if not self._model.eos_token_ids:
            raise UnsupportedFieldError(
                f"{spec.field}: this model has no end-of-sequence token, so its output cannot be constrained",
                param=spec.field,
            )
        return self._compiler.compile(spec)

    def close(self) -> None:
        """Ends the compiler. Idempotent."""
        self._compiler.close()


def constrained(prepared: Prepared, source: str) -> Prepared:
    """The request with its grammar compiled. Raises InvalidRequestError for many choices of a large grammar."""
    spec = prepared.grammar
    assert spec is not None
    if prepared.num_choices * len(source) > MAX_GRAMMAR_COPIES_BYTES:
        raise InvalidRequestError(
            f"{spec.field}: the grammar has {len(source)} bytes, too many for {prepared.num_choices} choices; lower n",
            param="n",
        )
    requests = tuple(msgspec.structs.replace(request, grammar=source) for request in prepared.requests)
    return replace(prepared, requests=requests)


def grammar_vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> tuple[TokenTable, Spell]:
    """A tokenizer as matchers see it."""
    return token_table(tokenizer, eos_token_ids), lambda text: _spelled(tokenizer, text)


def token_table(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> TokenTable:
    """The vocabulary as a value."""
    from octavo.grammar.tokens import TokenTable

    return TokenTable(
        pieces=tokenizer.pieces,
        special_ids=tuple(token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)),
        eos_ids=tuple(eos_token_ids),
    )


_BEFORE = "\n"


def _spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that stands in the middle of others."""
    try:
        if not tokenizer.adds_leading_space:
            return tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        ids = tokenizer.encode(_BEFORE + text, add_special_tokens=False, parse_special=False)
    except InvalidRequestError:  # it holds the text of a control token
        return []
    before = b""
    for place, token in enumerate(ids):
        before += tokenizer.pieces[token]
        if before.strip(b" ") == _BEFORE.encode():
            return ids[place + 1 :]
    return []
