"""Structural tags: free text in which some parts must be as told. vLLM's and xgrammar's forms. Knows no tokens but control tokens.

The older form is `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, the newer one `{"format": {"type": ...}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar.lark import LarkWriter, Tag
from octavo.grammar.schema import parse_schema
from octavo.grammar.spec import GrammarSpec

MAX_DEPTH = 32
_FORMATS = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags or tags_with_separator"


def structural_tag_lark(spec: GrammarSpec, specials: Mapping[str, int]) -> str:
    """The grammar of structural tags. Raises InvalidRequestError naming what is wrong."""
    value = parse_schema(spec.text, spec.field)
    reader = _Reader(spec, specials)
    fields = reader.fields(value, spec.field, {"type", "format", "structures", "triggers"})
    if fields.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequestError(f'{spec.field}.type must be "structural_tag"', param=spec.field)
    if "format" in fields:
        if "structures" in fields or "triggers" in fields:
            raise InvalidRequestError(f"{spec.field}: give either format, or structures and triggers", param=spec.field)
        return reader.writer.text(reader.format(fields["format"], f"{spec.field}.format", 0, last=True))
    return reader.writer.text(reader.structures(fields))


class _Reader:
    def __init__(self, spec: GrammarSpec, specials: Mapping[str, int]) -> None:
        self._field = spec.field
        self.writer = LarkWriter(spec, specials)

    def error(self, message: str) -> InvalidRequestError:
        return InvalidRequestError(message, param=self._field)

    def fields(self, value: Any, place: str, known: set[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{place} must be an object")
        if unknown := sorted(set(value) - known):
            raise UnsupportedFieldError(f"{place} has the unknown field {unknown[0]!r:.60}", param=self._field)
        return value

    def structures(self, fields: Mapping[str, Any]) -> str:
        structures, triggers = fields.get("structures"), fields.get("triggers")
        place = self._field
        if not isinstance(structures, list) or not structures:
            raise self.error(f"{place}.structures must be a list of at least one object")
        tags = []
        for index, one in enumerate(structures):
            at = f"{place}.structures[{index}]"
            tag = self.fields(one, at, {"begin", "schema", "end"})
            tags.append(
                Tag(
                    self.word(tag, "begin", at),
                    self.writer.json(tag.get("schema", True)),
                    self.word(tag, "end", at, empty=True),
                )
            )
        return self.writer.triggered(tags, self.triggers(triggers, tags, place))

    def word(self, fields: Mapping[str, Any], name: str, place: str, *, empty: bool = False) -> str:
        text = fields.get(name, "" if empty else None)
        if not isinstance(text, str) or not (text or empty):
            raise self.error(f"{place}.{name} must be a text" + ("" if empty else " that is not empty"))
        return text

    def flag(self, fields: Mapping[str, Any], name: str, place: str) -> bool:
        value = fields.get(name, False)
        if not isinstance(value, bool):
            raise self.error(f"{place}.{name} must be true or false")
        return value

    def triggers(self, triggers: Any, tags: list[Tag], place: str) -> list[str]:
        if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers):
            raise self.error(f"{place}.triggers must be a list of texts, none empty")
        for tag in tags:
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                raise self.error(f"{place}: the begin {tag.begin!r:.60} starts with none of the triggers")
        return triggers

    def format(self, value: Any, place: str, depth: int, *, last: bool = False) -> str:
        """Terms of a format. `last`: nothing follows it, so it may be free text."""
        if depth > MAX_DEPTH:
            raise self.error(f"{place} is nested more than {MAX_DEPTH} levels deep")
        kind = value.get("type") if isinstance(value, dict) else None
        writer = self.writer
        match kind:
            case "const_string":
                fields = self.fields(value, place, {"type", "value"})
                return writer.words(self.word(fields, "value", place))
            case "json_schema":
                fields = self.fields(value, place, {"type", "json_schema"})
                return writer.json(fields.get("json_schema"))
            case "regex":
                fields = self.fields(value, place, {"type", "pattern"})
                return writer.regex(self.word(fields, "pattern", place))
            case "any_text":
                self.fields(value, place, {"type"})
                if not last:
                    raise self.error(f"{place}: any_text must come last, or be the content of a tag with an end")
                return writer.free_text()
            case "sequence" | "or":
                elements = self.fields(value, place, {"type", "elements"}).get("elements")
                if not isinstance(elements, list) or not elements:
                    raise self.error(f"{place}.elements must be a list that is not empty")
                parts = [
                    self.format(
                        one,
                        f"{place}.elements[{index}]",
                        depth + 1,
                        last=last and (kind == "or" or index == len(elements) - 1),
                    )
                    for index, one in enumerate(elements)
                ]
                return " ".join(parts) if kind == "sequence" else writer.any_of(parts)
            case "tag":
                return writer.tag(self.tag(value, place, depth, last=last))
            case "triggered_tags" | "tags_with_separator":
                return self.several(value, kind, place, depth, last=last)
            case _:
                raise UnsupportedFieldError(f"{place}.type is {kind!r:.40}; expected {_FORMATS}", param=self._field)

    def tag(self, value: Any, place: str, depth: int, *, last: bool) -> Tag:
        fields = self.fields(value, place, {"type", "begin", "content", "end"})
        begin = self.word(fields, "begin", place)
        end = self.word(fields, "end", place, empty=True)
        content = fields.get("content")
        if end and content == {"type": "any_text"}:
            return Tag(begin, self.writer.text_until(end), "")
        return Tag(begin, self.format(content, f"{place}.content", depth + 1, last=last and not end), end)

    def several(self, value: Any, kind: str, place: str, depth: int, *, last: bool) -> str:
        own = "triggers" if kind == "triggered_tags" else "separator"
        fields = self.fields(value, place, {"type", "tags", own, "at_least_one", "stop_after_first"})
        given = fields.get("tags")
        if not isinstance(given, list) or not given:
            raise self.error(f"{place}.tags must be a list that is not empty")
        tags = [self.tag(one, f"{place}.tags[{index}]", depth + 1, last=False) for index, one in enumerate(given)]
        at_least_one = self.flag(fields, "at_least_one", place)
        stop_after_first = self.flag(fields, "stop_after_first", place)
        if kind == "triggered_tags":
            if not last:
                raise self.error(f"{place}: triggered_tags must come last, since free text surrounds them")
            triggers = self.triggers(fields.get("triggers"), tags, place)
            return self.writer.triggered(tags, triggers, at_least_one=at_least_one, stop_after_first=stop_after_first)
        tag = self.writer.any_of([self.writer.tag(one) for one in tags])
        separator = self.word(fields, "separator", place, empty=True)
        more = "" if stop_after_first else f" ({self.writer.words(separator) if separator else ''} {tag})*"
        body = self.writer.rule(f"{tag}{more}")
        return body if at_least_one else f"{body}?"
