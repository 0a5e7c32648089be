"""From chat chunks to the events and the object of a message. Knows no engine and no HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from octavo.server.protocol import ChatChunk, Usage

Event = dict[str, Any]


class MessageAnswer:
    """One message while it is made: `begin`, `take` chunks, `finish`. `body()` is the object as it stands."""

    def __init__(self, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._text: list[str] = []
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
            text = choice.delta.content
            if text is not UNSET and text:
                if not self._text:
                    yield self._start({"type": "text", "text": ""})
                self._text.append(text)
                yield {
                    "type": "content_block_delta",
                    "index": len(self._blocks),
                    "delta": {"type": "text_delta", "text": text},
                }
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                self._stop = None if choice.stop_reason is UNSET else choice.stop_reason

    def finish(self, usage: Usage) -> Iterator[Event]:
        """The last events of a natural end."""
        self._usage = usage
        if self._text:
            yield {"type": "content_block_stop", "index": len(self._blocks)}
            self._blocks.append({"type": "text", "text": "".join(self._text)})
            self._text = []
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

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": len(self._blocks), "content_block": block}

    def _end(self) -> tuple[str | None, str | None]:
        if self._finish_reason is None:
            return None, None
        if isinstance(self._stop, str):
            return "stop_sequence", self._stop
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(self._finish_reason, "end_turn"), None


def usage_object(usage: Usage) -> dict[str, int]:
    """Counts in Anthropic's way, where input tokens are those that did not come from the cache."""
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
