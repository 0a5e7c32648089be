"""Formats that write each argument between tags: glm45, glm47 and qwen3_coder. The arguments become JSON as they come.

What stands between the tags is text. Whether it is meant as a string or as another value, the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.text.calls.json_text import JsonParser, escaped
from octavo.text.calls.machine import END, Check, Steps, drop

_ANY = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_HOPS = 16


def kinds_of(schema: Any, root: Any, hops: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows, as far as that is easily seen; all of them where it is not."""
    if not isinstance(schema, Mapping) or hops > _MAX_HOPS:
        return _ANY
    if isinstance(reference := schema.get("$ref"), str):
        target = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return kinds_of(target, root, hops + 1)
    if isinstance(kind := schema.get("type"), (str, list)):
        return frozenset([kind] if isinstance(kind, str) else [one for one in kind if isinstance(one, str)])
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_kind, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            return frozenset().union(*(kinds_of(option, root, hops + 1) for option in options))
    if isinstance(parts := schema.get("allOf"), list) and parts:
        return _ANY.intersection(*(kinds_of(part, root, hops + 1) for part in parts))
    return _ANY


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    return kinds[type(value)]


def argument_json(text: str, kinds: frozenset[str]) -> str:
    """The JSON of an argument that a model wrote as text: the value it spells if the schema allows its type, else a string."""
    bare = text.strip()
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(bare, bare), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _kind(value)
    fits = kind in kinds or (kind == "integer" and "number" in kinds) or (kind == "number" and "integer" in kinds)
    return json.dumps(value, ensure_ascii=False) if fits else json.dumps(text, ensure_ascii=False)


def _refuse(_: str) -> None:
    raise ValueError


class _TaggedParser(JsonParser):
    """What both have in common: arguments one by one."""

    def begin(self, name: str) -> None:
        """Begins a call."""
        self.call(name)
        self._schema: Any = self.tools.get(name)
        self._num_arguments = 0

    def argument(self, key: str, ends: tuple[str, ...], *, lines: bool) -> Steps:
        """The value of an argument up to one of `ends`, which is left unread unless it is the first of them.

        `lines`: a line break after the opening and before the closing tag is not part of it.
        """
        self.arguments(("{" if self._num_arguments == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_arguments += 1
        if lines and (yield from self.exactly("\n")) == END:
            pass
        properties = self._schema.get("properties") if isinstance(self._schema, Mapping) else None
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        kinds = _ANY if schema is None else kinds_of(schema, self._schema)
        if kinds == {"string"}:
            self.arguments('"')
            held = ""

            def sink(text: str) -> None:
                nonlocal held
                text = held + text
                held = "\n" if lines and text.endswith("\n") else ""
                self.arguments(escaped(text.removesuffix(held)))

            found = yield from self.until(ends, sink, whole=True)
            self.arguments('"' if found != END else "")
        else:
            text, found = yield from self.text_until(*ends)
            text = text.removesuffix("\n") if lines else text
            if found != END:
                self.arguments(argument_json(text, kinds))
        if found != ends[0]:
            self.unread(found)

    def finish(self) -> None:
        """Ends a call that is complete."""
        self.arguments("}" if self._num_arguments else "{}")


class Glm45Parser(_TaggedParser):
    """`<tool_call>NAME`, `<arg_key>K</arg_key>` and `<arg_value>V</arg_value>` for each argument, `</tool_call>`; blanks between them."""

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _run(self) -> Steps:
        while (yield from self.until(("<tool_call>",), self.content)) != END:
            self.record()
            name, found = yield from self.text_until("<arg_key>", "</tool_call>", "<tool_call>")
            text = self.recorded()
            if found in (END, "<tool_call>") or not name.strip():
                self.content("<tool_call>" + text.removesuffix("<tool_call>"))
                self.unread(found)
                continue
            self.begin(name.strip())
            while found == "<arg_key>":
                key, found = yield from self.text_until("</arg_key>", "</tool_call>")
                if found == "</arg_key>":
                    found = yield from self.until(("<arg_value>", "</tool_call>"), drop)
                if found != "<arg_value>":
                    break
                yield from self.argument(key.strip(), ("</arg_value>", "</tool_call>", "<arg_key>"), lines=False)
                found = yield from self.until(("<arg_key>", "</tool_call>"), drop)
            if found != END:
                self.finish()


class Qwen3CoderParser(_TaggedParser):
    """`<tool_call>`, `<function=NAME>`, `<parameter=K>` V `</parameter>` for each argument, `</function>`, `</tool_call>`.

    Models leave out the outer tags at times.
    """

    markers = ("<tool_call>", "</tool_call>")

    def _run(self) -> Steps:
        while (found := (yield from self.until(("<tool_call>", "<function="), self.content))) != END:
            if found == "<tool_call>":
                self.record()
                character = yield from self.next_visible()
                self.unread(character)
                if (yield from self.exactly("<function=")) == END:
                    self.content("<tool_call>" + self.recorded())
                    continue
                self.recorded()
            if (yield from self._function()) and found == "<tool_call>":
                character = yield from self.next_visible()
                self.unread(character)
                yield from self.exactly("</tool_call>")

    def _function(self) -> Check:
        name, found = yield from self.text_until(">")
        if found == END:
            return False
        self.begin(name.strip())
        tags = ("<parameter=", "</function>", "</tool_call>")
        while (found := (yield from self.until(tags, drop))) == "<parameter=":
            key, found = yield from self.text_until(">")
            if found == END:
                return False
            yield from self.argument(key.strip(), ("</parameter>", *tags), lines=True)
        if found == END:
            return False
        self.finish()
        if found == "</tool_call>":
            self.unread(found)
        return True
