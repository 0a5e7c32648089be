"""From a `GrammarSpec` to a *source*: the text that llguidance makes a matcher of. Knows no limits.

Runs where it may be stopped: the conversion of EBNF takes time and recursion that grow with the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from octavo.errors import InvalidRequestError
from octavo.grammar.lark import literal, regex_term
from octavo.grammar.schema import parse_schema, prepare_schema
from octavo.grammar.spec import GrammarKind, GrammarSpec
from octavo.grammar.tags import structural_tag_lark


def source_of(spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    """The source of a constraint. `specials`: ids of control tokens by their text.

    Raises InvalidRequestError for what is wrong without looking at tokens.
    """
    match spec.kind:
        case GrammarKind.JSON:
            schema = prepare_schema(parse_schema(spec.text, spec.field), spec)
            return json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False)
        case GrammarKind.REGEX:
            return f"start: {regex_term(spec.text)}"
        case GrammarKind.CHOICE:
            return _choice(spec)
        case GrammarKind.GRAMMAR:
            return _grammar(spec)
        case GrammarKind.STRUCTURAL_TAG:
            return structural_tag_lark(spec, specials)


def _choice(spec: GrammarSpec) -> str:
    choices = parse_schema(spec.text, spec.field)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequestError(f"{spec.field} must be a list of at least one text, none empty", param=spec.field)
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, dict.fromkeys(choices)))


def _grammar(spec: GrammarSpec) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(spec.text)
    except RecursionError:
        raise InvalidRequestError(f"{spec.field}: the grammar is nested too deeply", param=spec.field) from None
    except Exception as error:  # noqa: BLE001 - the converter raises bare exceptions
        raise InvalidRequestError(f"{spec.field}: the grammar is wrong: {error}", param=spec.field) from None
