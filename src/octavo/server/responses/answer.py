"""From chat chunks to the events and the object of a response. Knows no engine, no store and no HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.errors import OctavoError
from octavo.frontend.params import SamplingParams
from octavo.server.protocol import ChatChunk, ChatLogprob, Usage
from octavo.server.responses.convert import Item, wants_logprobs
from octavo.server.responses.protocol import ResponsesRequest

Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id of the server's own."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseAnswer:
    """One response while it is made: `take` chunks, then `finish`. `body()` is the object as it stands."""

    def __init__(self, body: ResponsesRequest, model: str, params: SamplingParams, *, store: bool) -> None:
        self.id = new_id("resp")
        self._body = body
        self._model = model
        self._params = params
        self._store = store
        self._created = int(time.time())
        self._completed: int | None = None
        self._sequence = 0
        self._status = "in_progress"
        self._error: OctavoError | None = None
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self._output: list[Item] = []
        self._text: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._keeps_logprobs = wants_logprobs(body)

    @property
    def output(self) -> list[Item]:
        """The finished items."""
        return self._output

    def begin(self) -> Iterator[Event]:
        """The first events of a stream."""
        yield self._event("response.created", response=self.body())
        yield self._event("response.in_progress", response=self.body())

    def take(self, chunk: ChatChunk) -> Iterator[Event]:
        """What a chunk adds."""
        for choice in chunk.choices:
            text = choice.delta.content
            if text is not UNSET and text:
                yield from self._add_text(text, list(choice.logprobs.content) if choice.logprobs else [])
            elif choice.logprobs:
                self._logprobs += choice.logprobs.content
            self._finish_reason = choice.finish_reason or self._finish_reason

    def finish(self, usage: Usage) -> Iterator[Event]:
        """The last events of a natural end."""
        self._usage = usage
        self._status = "incomplete" if self._finish_reason == "length" else "completed"
        yield from self._close_message()
        self._completed = int(time.time())
        yield self._event(f"response.{self._status}", response=self.body())

    def fail(self, error: OctavoError, *, status: str = "failed") -> Event:
        """The last event after an error, or `status` "cancelled" after a wish of the client."""
        self._status = status
        self._error = error if status == "failed" else None
        return self._event(f"response.{status}", response=self.body())

    def body(self) -> dict[str, Any]:
        """The response object."""
        body, usage = self._body, self._usage
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self._status,
            "background": bool(body.background),
            "error": {"code": "server_error", "message": self._error.message} if self._error else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._store,
            "temperature": self._params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": _usage(usage) if usage else None,
            "user": body.user,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    # --- the message ------------------------------------------------------------------------------------------------

    def _add_text(self, text: str, logprobs: list[ChatLogprob]) -> Iterator[Event]:
        if not self._text:
            self._item_id = new_id("msg")
            item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=len(self._output), item=item)
            yield self._event("response.content_part.added", **self._place(), part=self._part("", []))
        self._text.append(text)
        self._logprobs += logprobs
        yield self._event(
            "response.output_text.delta", **self._place(), delta=text, logprobs=logprobs if self._keeps_logprobs else []
        )

    def _close_message(self) -> Iterator[Event]:
        if not self._text:
            return
        text = "".join(self._text)
        shown = self._logprobs if self._keeps_logprobs else []
        part = self._part(text, shown)
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=shown)
        yield self._event("response.content_part.done", **self._place(), part=part)
        status = "incomplete" if self._finish_reason == "length" else "completed"
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._text, self._logprobs = [], []

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}

    @staticmethod
    def _part(text: str, logprobs: list[ChatLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": msgspec.to_builtins(logprobs)}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
