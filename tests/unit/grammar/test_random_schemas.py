"""Random schemas, and random outputs that their grammars allow: all are valid by an independent validator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.bench.http.structured import fault_of
from octavo.bench.schemas import random_schema
from octavo.grammar import GrammarKind, GrammarSpec
from octavo.grammar.source import source_of
from octavo.grammar.tokens import TokenTable, make_tokenizer
from support.walks import walk

PIECES = (*(bytes([byte]) for byte in range(256)), b"<eos>")
EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(TokenTable(pieces=PIECES, special_ids=(EOS,), eos_ids=(EOS,)), lambda _: ())


def test_outputs_are_valid(tokenizer: Any) -> None:
    for seed in range(120):
        schema = random_schema(seed)
        spec = GrammarSpec(kind=GrammarKind.JSON, text=json.dumps(schema), field="x")
        text = walk(tokenizer, PIECES, EOS, source_of(spec, {}), seed)
        fault = fault_of(schema, text)
        assert fault is None, f"seed {seed}: {fault}"
