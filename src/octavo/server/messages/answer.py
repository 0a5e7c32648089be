"""From chat chunks to the events and the object of a message. Knows no engine and no HTTP."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from octavo.server.protocol import ChatChunk, ToolCallDelta, Usage

Event = dict[str, Any]


class MessageAnswer:
    """One message while it is made: `begin`, `take` chunks, `finish`. `body()` is the object as it stands.

    Blocks are made one after another: thinking, text and calls, in whichever order the model says them.
    """

    def __init__(self, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call_index: int | None = None
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._stop: int | str | None = None
        self._usage = Usage(0, 0, 0)

    def begin(self, usage: Usage) -> Iterator[Event]:
        """The first events of a stream."""
        self._usage = usage
        yield {"type": "message_start", "message": self.body()}
        yield {"type": "ping"}

    def take(self, chunk: ChatChunk) -> Iterator[Event]:
        """What a chunk adds."""
        for choice in chunk.choices:
            delta = choice.delta
            if delta.reasoning is not UNSET and delta.reasoning:
                yield from self._add({"type": "thinking", "thinking": "", "signature": ""}, delta.reasoning)
            if delta.content is not UNSET and delta.content:
                yield from self._add({"type": "text", "text": ""}, delta.content)
            for call in delta.tool_calls or ():
                yield from self._add_call(call)
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                self._stop = None if choice.stop_reason is UNSET else choice.stop_reason

    def finish(self, usage: Usage) -> Iterator[Event]:
        """The last events of a natural end."""
        self._usage = usage
        yield from self._close()
        reason, sequence = self._end()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": usage_object(usage)}
        yield {"type": "message_stop"}

    def body(self) -> dict[str, Any]:
        """The message object."""
        reason, sequence = self._end()
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_object(self._usage),
        }

    def _add(self, block: dict[str, Any], text: str) -> Iterator[Event]:
        kind = block["type"]
        if self._open is None or self._open["type"] != kind:
            yield from self._start(block)
        name = "thinking" if kind == "thinking" else "text"
        yield self._delta({"type": f"{name}_delta", name: text}, text)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.index != self._call_index or self._open is None or self._open["type"] != "tool_use":
            yield from self._start({"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}})
            self._call_index = call.index
        if call.function.arguments is not UNSET and call.function.arguments:
            arguments = call.function.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments}, arguments)

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        yield {"type": "content_block_start", "index": len(self._blocks), "content_block": block}

    def _delta(self, delta: dict[str, Any], text: str) -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        yield {"type": "content_block_stop", "index": len(self._blocks)}
        block, text = self._open, "".join(self._texts)
        match block["type"]:
            case "tool_use":
                block = {**block, "input": _input(text)}
            case kind:
                block = {**block, kind: text}
        self._blocks.append(block)
        self._open, self._texts = None, []

    def _end(self) -> tuple[str | None, str | None]:
        if self._finish_reason is None:
            return None, None
        if isinstance(self._stop, str):
            return "stop_sequence", self._stop
        if self._finish_reason == "length":
            return "max_tokens", None
        called = any(block["type"] == "tool_use" for block in self._blocks)  # chat ends a named call with "stop"
        return "tool_use" if called else "end_turn", None


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object they have to be here; what a model got wrong stays readable, as Anthropic advises."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def usage_object(usage: Usage) -> dict[str, int]:
    """Counts in Anthropic's way, where input tokens are those that did not come from the cache."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
