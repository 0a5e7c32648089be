"""Grammars of tool calls in the formats of `octavo.text.calls`, so that arguments fit the schemas of their tools. Knows no prompts.

Formats write calls as JSON, as Python calls, or argument by argument between tags. In the last two only properties that a schema lists can
be written, in their order, and what else the schema says of the object as a whole cannot be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar.lark import FREE_TEXT, LarkWriter, Tag, literal, regex_term
from octavo.grammar.schema import known_schema
from octavo.grammar.spec import CallsSpec, GrammarSpec, ToolSpec

_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_NOTES = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly"}
)
_STRING_KEYWORDS = frozenset({"type", "pattern", "minLength", "maxLength"})
_MAX_HOPS = 16


def calls_lark(spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    """The grammar of an output that calls tools. Raises InvalidRequestError, UnsupportedFieldError naming a keyword."""
    calls = msgspec.json.decode(spec.text, type=CallsSpec)
    return _Writer(spec, calls, specials).text()


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A format. `trigger`: what opens a call in running text, None where calls are the whole output. `before`, `after`: what stands around
    all calls, `between`: what is between two.
    """

    trigger: str | None
    calls: list[Tag]
    before: str = ""
    after: str = ""
    between: str = ""


class _Writer:
    def __init__(self, spec: GrammarSpec, calls: CallsSpec, specials: Mapping[str, int]) -> None:
        self._spec = spec
        self._calls = calls
        self._specials = specials
        self.lark = LarkWriter(spec, specials)

    def text(self) -> str:
        """The whole grammar."""
        calls, lark = self._calls, self.lark
        form = _FORMATS[calls.format](self)
        if calls.required:
            return lark.text(self._several(form, opened=False))
        if calls.content is not None:
            return lark.text(lark.any_of([self._several(form, opened=False), lark.rule("@content")]))
        if form.trigger is None:  # the output as a whole is calls, or does not begin like one
            other = lark.rule(f"/{_not_beginning([form.before + tag.begin for tag in form.calls])}/", terminal=True)
            return lark.text(lark.any_of([self._several(form, opened=False), other]))
        if form.before:
            rest = lark.rule(self._several(form, opened=True))
            return lark.text(f"({lark.text_until(form.before)} {rest})? {lark.free_text()}")
        return lark.text(lark.triggered(form.calls, [form.trigger], stop_after_first=not calls.parallel))

    def _several(self, form: Form, *, opened: bool) -> str:
        """Terms for one call or more and what stands around them; `opened`: what stands before them has been read."""
        lark = self.lark
        # One literal: where text could go on in another way, the lexer tells them apart by a whole lexeme.
        before = "" if opened else form.before
        first = lark.any_of([lark.tag(Tag(before + tag.begin, tag.body, tag.end)) for tag in form.calls])
        more = ""
        if self._calls.parallel:
            later = lark.any_of([lark.tag(tag) for tag in form.calls]) if before else first
            more = f"({lark.words(form.between) if form.between else ''} {later})*"
        return " ".join(filter(None, (first, more, lark.words(form.after) if form.after else "")))

    # --- arguments --------------------------------------------------------------------------------------------------

    def json(self, tool: ToolSpec, schema: Any) -> str:
        """A term for a JSON value."""
        spec = msgspec.structs.replace(self._spec, field=f"tools ({tool.name})", lenient=not tool.strict)
        return self.lark.json(schema if tool.strict else known_schema(schema), spec)

    def parameters(self, tool: ToolSpec) -> Mapping[str, Any]:
        """The schema of a tool's arguments, which are an object."""
        schema = tool.parameters or {}
        if "type" not in schema and not ({"$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & set(schema)):
            schema = {"type": "object", **schema}
        if not tool.parameters:
            schema = {**schema, "additionalProperties": False}
        return schema

    def listed(self, tool: ToolSpec, write: Callable[[ToolSpec, str, Any], str], separator: str) -> str:
        """Terms for the listed properties of a tool in their order, required ones always; `write` gives the term of one."""
        schema = self.parameters(tool)
        properties = schema.get("properties", {})
        if tool.strict and (unknown := sorted(set(schema) - _OBJECT_KEYWORDS - _NOTES)):
            raise self._unsupported(tool, unknown[0])
        if schema.get("type") != "object" or not isinstance(properties, Mapping):
            raise InvalidRequestError(
                f"tools ({tool.name}): parameters must be an object with properties in this model's format",
                param="tools",
            )
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        required = set(map(str, schema.get("required") or ()))
        if missing := sorted(required - set(properties)):
            raise InvalidRequestError(
                f"tools ({tool.name}): {missing[0]!r:.60} is required but not among the properties", param="tools"
            )
        terms = [
            (write(tool, name, {**shared, **own} if isinstance(own, Mapping) else own), name in required)
            for name, own in properties.items()
        ]
        return self._sequence(terms, self.lark.words(separator) if separator else "")

    def _sequence(self, terms: Sequence[tuple[str, bool]], separator: str) -> str:
        """Terms in order, some optional, separated. Rules from the end: what may follow when nothing, and when something, is written."""
        lark = self.lark
        if not separator:
            return " ".join(term if needed else f"{lark.rule(term)}?" for term, needed in terms)
        first, later = "", ""
        for term, needed in reversed(terms):
            with_first = f"{term} {later}".strip()
            with_later = f"{separator} {term} {later}".strip()
            if needed:
                first, later = lark.rule(with_first), lark.rule(with_later)
            else:
                first = lark.rule(f"{with_first} | {first}" if first else f"({with_first})?")
                later = lark.rule(f"{with_later} | {later}" if later else f"({with_later})?")
        return first

    def raw(self, tool: ToolSpec, schema: Any, end: str) -> str:
        """Terms for a value written as text up to `end`: strings as they are, others as JSON."""
        lark = self.lark
        schema = _resolved(schema)
        if not isinstance(schema, Mapping):
            return lark.text_until(end)
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list) and options:
                shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                return lark.any_of(
                    [self.raw(tool, {**shared, **one} if isinstance(one, Mapping) else one, end) for one in options]
                )
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            terms = [literal(value) for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            terms += [self.json(tool, {"enum": others})] if others else []
            return f"{lark.any_of(terms)} {lark.words(end)}"
        kind = schema.get("type", "string" if _STRING_KEYWORDS & set(schema) else None)
        kinds = [kind] if isinstance(kind, str) else kind
        if isinstance(kinds, list) and "string" not in kinds:
            return f"{self.json(tool, schema)} {lark.words(end)}"
        return self._string_until(tool, schema, end, only=kinds == ["string"])

    def _string_until(self, tool: ToolSpec, schema: Mapping[str, Any], end: str, *, only: bool) -> str:
        """Terms for a value that may be a string. Where it may be `only` that, what its schema says of its length and pattern is obeyed."""
        known = _STRING_KEYWORDS if only else {"type"}
        unknown = sorted(set(schema) - known - _NOTES - {"$defs", "definitions"})
        if tool.strict and unknown:
            raise self._unsupported(tool, unknown[0])
        body = FREE_TEXT
        if only and not {"minLength", "maxLength"}.isdisjoint(schema):
            body = rf"/(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
        if only and isinstance(pattern := schema.get("pattern"), str):
            if pattern[:1] == "^" and pattern[-1:] == "$" and body == FREE_TEXT:
                body = regex_term(pattern[1:-1])
            elif tool.strict:
                raise self._unsupported(tool, "pattern")
        return self.lark.text_until(end, body)

    def _unsupported(self, tool: ToolSpec, keyword: str) -> UnsupportedFieldError:
        return UnsupportedFieldError(
            f"tools ({tool.name}): the schema keyword {keyword} cannot be enforced in this model's format of calls: remove it",
            param="tools",
        )

    # --- formats ----------------------------------------------------------------------------------------------------

    def tags(self, begin: Callable[[str], str], body: Callable[[ToolSpec], str], end: str) -> list[Tag]:
        """The calls of all tools."""
        return [Tag(begin(tool.name), body(tool), end) for tool in self._calls.tools]

    def object(self, tool: ToolSpec) -> str:
        """The arguments as a JSON object."""
        return self.json(tool, self.parameters(tool))

    def has_special(self, text: str) -> bool:
        """Whether the vocabulary has this control token."""
        return text in self._specials


def _not_beginning(openings: Sequence[str]) -> str:
    """A regex of the texts that begin with none of these, none of which is empty.

    A complement would do, were it not for llguidance's being one over bytes, invalid text included.
    """
    by_first: dict[str, list[str]] = {}
    for opening in openings:
        by_first.setdefault(opening[0], []).append(opening[1:])
    firsts = "".join(f"\\x{{{ord(first):x}}}" for first in by_first)
    longer = [f"\\x{{{ord(first):x}}}{_not_beginning(rests)}" for first, rests in by_first.items() if "" not in rests]
    return f"({'|'.join([f'[^{firsts}](.|{chr(92)}n)*', *longer])})?"


def _resolved(schema: Any) -> Any:
    """What a schema that is a reference into its own definitions refers to."""
    for _ in range(_MAX_HOPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = schema
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        schema = {**shared, **target} if isinstance(target, Mapping) else target
    return schema


def _name(name: str) -> str:
    return json.dumps(name)


def _hermes(writer: _Writer) -> Form:
    tags = writer.tags(
        lambda name: f'<tool_call>\n{{"name": {_name(name)}, "arguments": ', writer.object, "}\n</tool_call>"
    )
    return Form(trigger="<tool_call>", calls=tags, between="\n")


def _llama3_json(writer: _Writer) -> Form:
    tags = writer.tags(lambda name: f'{{"name": {_name(name)}, "parameters": ', writer.object, "}")
    return Form(trigger=None, calls=tags, between="; ")


def _mistral(writer: _Writer) -> Form:
    if writer.has_special("[ARGS]"):
        tags = writer.tags(lambda name: f"[TOOL_CALLS]{name}[ARGS]", writer.object, "")
        return Form(trigger="[TOOL_CALLS]", calls=tags)
    tags = writer.tags(lambda name: f'{{"name": {_name(name)}, "arguments": ', writer.object, "}")
    return Form(trigger="[TOOL_CALLS]", calls=tags, before="[TOOL_CALLS] [", after="]", between=", ")


def _pythonic(writer: _Writer) -> Form:
    def argument(tool: ToolSpec, key: str, schema: Any) -> str:
        return f"{literal(key + '=')} {writer.json(tool, schema)}"

    tags = writer.tags(lambda name: f"{name}(", lambda tool: writer.listed(tool, argument, ", "), ")")
    return Form(trigger=None, calls=tags, before="[", after="]", between=", ")


def _deepseek_v3(writer: _Writer) -> Form:
    tags = writer.tags(
        lambda name: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        writer.object,
        "\n```<｜tool▁call▁end｜>",
    )
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return Form(trigger=begin, calls=tags, before=begin, after=end, between="\n")


def _glm(line_break: str) -> Callable[[_Writer], Form]:
    def form(writer: _Writer) -> Form:
        def argument(tool: ToolSpec, key: str, schema: Any) -> str:
            begin = writer.lark.words(f"<arg_key>{key}</arg_key>{line_break}<arg_value>")
            return f"{begin} {writer.raw(tool, schema, f'</arg_value>{line_break}')}"

        tags = writer.tags(
            lambda name: f"<tool_call>{name}{line_break}",
            lambda tool: writer.listed(tool, argument, ""),
            "</tool_call>",
        )
        return Form(trigger="<tool_call>", calls=tags, between="\n")

    return form


def _qwen3_coder(writer: _Writer) -> Form:
    def argument(tool: ToolSpec, key: str, schema: Any) -> str:
        begin = writer.lark.words(f"<parameter={key}>\n")
        return begin + " " + writer.raw(tool, schema, "\n</parameter>\n")

    tags = writer.tags(
        lambda name: f"<tool_call>\n<function={name}>\n",
        lambda tool: writer.listed(tool, argument, ""),
        "</function>\n</tool_call>",
    )
    return Form(trigger="<tool_call>", calls=tags, between="\n")


_FORMATS: dict[str, Callable[[_Writer], Form]] = {
    "hermes": _hermes,
    "qwen": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "deepseek_v3": _deepseek_v3,
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "qwen3_coder": _qwen3_coder,
}
