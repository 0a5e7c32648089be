"""From a `GrammarSpec` to a *source*: the text that llguidance makes a matcher of. Knows no limits.

Runs where it may be stopped: the conversion of EBNF takes time and recursion that grow with the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError
from octavo.grammar.calls import calls_lark
from octavo.grammar.lark import LarkWriter, literal, regex_term
from octavo.grammar.schema import check_length, parse_schema, prepare_schema
from octavo.grammar.spec import CallsSpec, GrammarKind, GrammarSpec, Reasoning
from octavo.grammar.tags import structural_tag_lark


def source_of(spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    """The source of a constraint. `specials`: ids of control tokens by their text.

    Raises InvalidRequestError for what is wrong without looking at tokens.
    """
    if spec.reasoning is not None:
        return _after_reasoning(source_of(msgspec.structs.replace(spec, reasoning=None), specials), spec, specials)
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
        case GrammarKind.CALLS:
            return _calls(spec, specials)


def _calls(spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    content = msgspec.json.decode(spec.text, type=CallsSpec).content
    main = {"lark_grammar": calls_lark(spec, specials)}
    if content is None:
        return json.dumps({"grammars": [main]}, ensure_ascii=False)
    return json.dumps({"grammars": [main, *_named(source_of(content, specials), "content")]}, ensure_ascii=False)


def _after_reasoning(source: str, spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    """The grammar of an output that reasons first: `</think>` and a few blanks stand before what is constrained."""
    lark = LarkWriter(spec, specials)
    blanks = lark.rule(r"/[ \r\n]{0,4}/", terminal=True)
    rest = f"{lark.text_until('</think>')} {blanks}"
    if spec.reasoning is Reasoning.POSSIBLE:
        rest = f"({lark.words('<think>')} {lark.rule(rest)})?"
    main = {"lark_grammar": lark.text(f"{rest} @main")}
    return json.dumps({"grammars": [main, *_named(source, "main")]}, ensure_ascii=False)


def _named(source: str, name: str) -> list[dict[str, Any]]:
    """The grammars of a source, the first of them under a name that others refer to it by."""
    grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return [{**grammars[0], "name": name}, *grammars[1:]]


def _choice(spec: GrammarSpec) -> str:
    choices = parse_schema(spec.text, spec.field)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequestError(f"{spec.field} must be a list of at least one text, none empty", param=spec.field)
    for choice in choices:
        check_length(choice, spec.field)
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, dict.fromkeys(choices)))


def _grammar(spec: GrammarSpec) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(spec.text)
    except RecursionError:
        raise InvalidRequestError(f"{spec.field}: the grammar is nested too deeply", param=spec.field) from None
    except Exception as error:  # noqa: BLE001 - the converter raises bare exceptions
        raise InvalidRequestError(f"{spec.field}: the grammar is wrong: {error}", param=spec.field) from None
