"""Formats whose calls are JSON objects: hermes (Qwen), llama3_json, mistral and deepseek_v3."""

from __future__ import annotations

from octavo.text.calls.json_text import JsonParser
from octavo.text.calls.machine import END, Check, Steps, drop


class HermesParser(JsonParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, text around them."""

    markers = ("<tool_call>", "</tool_call>")

    def _run(self) -> Steps:
        while (yield from self.until(("<tool_call>",), self.content)) != END:
            self.record()
            character = yield from self.next_visible()
            begun = character == "{" and (yield from self.call_object())
            text = self.recorded()
            if begun:
                if (yield from self.until(("</tool_call>", "<tool_call>"), drop)) == "<tool_call>":
                    self.unread("<tool_call>")
            else:
                self.content("<tool_call>" + text)


class Llama3JsonParser(JsonParser):
    """The whole output is `{"name": ..., "parameters": {...}}`, several separated by semicolons, `<|python_tag|>` may come first."""

    markers = ("<|python_tag|>",)

    def _run(self) -> Steps:
        while True:
            self.record()
            yield from self._calls()
            self.content(self.recorded())
            if (yield from self.until(("<|python_tag|>",), self.content)) == END:
                return

    def _calls(self) -> Steps:
        """Calls, as long as there are any. What is read after the last one is left recorded."""
        while True:
            character = yield from self.next_visible()
            if character == "<":
                self.unread(character)
                if (yield from self.exactly("<|python_tag|>")) == END:
                    return
                self.record()
                character = yield from self.next_visible()
            if character != "{":
                self.unread(character)
                return
            if not (yield from self.call_object(known_only=True)):
                return
            self.record()
            character = yield from self.next_visible()
            if character != ";":
                self.unread(character)
                return
            self.record()


class MistralParser(JsonParser):
    """`[TOOL_CALLS]` and then `[{"name": ..., "arguments": {...}}, ...]`, or, newer, `name{...}` or `name[ARGS]{...}`."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _run(self) -> Steps:
        while (yield from self.until(("[TOOL_CALLS]",), self.content)) != END:
            self.record()
            character = yield from self.next_visible()
            if character in "[{" and character != END:
                begun = yield from self._objects(character)
            else:
                self.unread(character)
                begun = yield from self._named()
            text = self.recorded()
            if not begun:
                self.content("[TOOL_CALLS]" + text)

    def _objects(self, character: str) -> Check:
        """A list of objects, or one object."""
        is_list, begun = character == "[", False
        if is_list:
            character = yield from self.next_visible()
        while character == "{":
            begun = (yield from self.call_object()) or begun
            if not is_list:
                return begun
            character = yield from self.next_visible()
            if character == ",":
                character = yield from self.next_visible()
        if character != "]":
            self.unread(character)
        return begun

    def _named(self) -> Check:
        name, found = yield from self.text_until("[ARGS]", "[CALL_ID]", "{", "[TOOL_CALLS]")
        if found == "[CALL_ID]":
            _, found = yield from self.text_until("[ARGS]", "{", "[TOOL_CALLS]")
        if found == "[ARGS]":
            found = yield from self.next_visible()
        if found != "{" or not name.strip():
            self.unread(found)
            return False
        self.call(name.strip())
        yield from self.value("{", self.arguments)
        return True


class DeepSeekV3Parser(JsonParser):
    """`<｜tool▁calls▁begin｜>`, calls, `<｜tool▁calls▁end｜>`. Between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` a call is
    `function<｜tool▁sep｜>NAME` and a code block of JSON, or as of V3.1 `NAME<｜tool▁sep｜>{...}`.
    """

    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def _run(self) -> Steps:
        outer, call, separator, end, last = self.markers
        while (found := (yield from self.until((outer, call, last), self.content))) != END:
            if found == call:
                yield from self._call(separator, end)
            self.trim()

    def _call(self, separator: str, end: str) -> Steps:
        before, found = yield from self.text_until(separator, end)
        if found != separator:
            return
        name = before.strip()
        if name == "function":
            name, character = yield from self.text_until("\n", "{", end)
            name = name.strip()
            if character == "\n" and (character := (yield from self.next_visible())) == "`":
                _, character = yield from self.text_until("{", "[", end)
        else:
            character = yield from self.next_visible()
        if character == END:
            return
        self.call(name)
        yield from self.value(character, self.arguments)
        _, call, _, _, last = self.markers
        if (found := (yield from self.until((end, call, last), drop))) != end:
            self.unread(found)
