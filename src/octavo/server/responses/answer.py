"""From chat chunks to the events and the object of a response. Knows no engine, no store and no HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.errors import OctavoError
from octavo.frontend.params import SamplingParams
from octavo.server.protocol import ChatChunk, ChatLogprob, ToolCallDelta, Usage
from octavo.server.responses.convert import Item, wants_logprobs
from octavo.server.responses.protocol import ResponsesRequest

Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id of the server's own."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseAnswer:
    """One response while it is made: `take` chunks, then `finish`. `body()` is the object as it stands.

    Items are made one after another: reasoning, a message, calls, in whichever order the model says them.
    """

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
        self._open: _Text | _Call | None = None
        self._waiting: list[ChatLogprob] = []
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
            delta = choice.delta
            if self._keeps_logprobs and choice.logprobs:
                self._waiting += choice.logprobs.content
            if delta.reasoning is not UNSET and delta.reasoning:
                yield from self._add_text("reasoning", delta.reasoning)
            if delta.content is not UNSET and delta.content:
                yield from self._add_text("message", delta.content)
            for call in delta.tool_calls or ():
                yield from self._add_call(call)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def finish(self, usage: Usage) -> Iterator[Event]:
        """The last events of a natural end."""
        self._usage = usage
        self._status = "incomplete" if self._finish_reason == "length" else "completed"
        yield from self._close(self._status)
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
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
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

    # --- items ------------------------------------------------------------------------------------------------------

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if not (isinstance(self._open, _Text) and self._open.kind == kind):
            yield from self._close("completed")
            self._open = opened = _Text(kind)
            yield self._event(
                "response.output_item.added", output_index=len(self._output), item=opened.item("in_progress")
            )
            yield self._event("response.content_part.added", **self._place(opened), part=opened.part("", ()))
        assert isinstance(self._open, _Text)
        self._open.texts.append(text)
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **self._place(self._open), delta=text)
            return
        logprobs, self._waiting = self._waiting, []
        self._open.logprobs += logprobs
        yield self._event("response.output_text.delta", **self._place(self._open), delta=text, logprobs=logprobs)

    def _add_call(self, delta: ToolCallDelta) -> Iterator[Event]:
        function = delta.function
        if not (isinstance(self._open, _Call) and self._open.index == delta.index):
            yield from self._close("completed")
            self._open = _Call(delta.index, str(delta.id), str(function.name))
            item = self._open.item("in_progress")
            yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        assert isinstance(self._open, _Call)
        if function.arguments is not UNSET and function.arguments:
            self._open.arguments.append(function.arguments)
            where = {"item_id": self._open.id, "output_index": len(self._output)}
            yield self._event("response.function_call_arguments.delta", **where, delta=function.arguments)

    def _close(self, status: str) -> Iterator[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return
        if isinstance(opened, _Text):
            if opened.kind == "message":  # those of an end that has no text of its own
                opened.logprobs += self._waiting
                self._waiting = []
            text = "".join(opened.texts)
            if opened.kind == "reasoning":
                yield self._event("response.reasoning_text.done", **self._place(opened), text=text)
            else:
                shown = opened.logprobs
                yield self._event("response.output_text.done", **self._place(opened), text=text, logprobs=shown)
            part = opened.part(text, opened.logprobs)
            yield self._event("response.content_part.done", **self._place(opened), part=part)
        else:
            done = {"item_id": opened.id, "output_index": len(self._output), "name": opened.name}
            yield self._event("response.function_call_arguments.done", **done, arguments="".join(opened.arguments))
        item = opened.item(status)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _place(self, opened: _Text) -> dict[str, Any]:
        return {"item_id": opened.id, "output_index": len(self._output), "content_index": 0}


class _Text:
    """A message or reasoning that is being made."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.id = new_id("rs" if kind == "reasoning" else "msg")
        self.texts: list[str] = []
        self.logprobs: list[ChatLogprob] = []

    def part(self, text: str, logprobs: Sequence[ChatLogprob]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": msgspec.to_builtins(logprobs)}

    def item(self, status: str) -> Item:
        content = [self.part("".join(self.texts), self.logprobs)] if self.texts else []
        own: Item = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"id": self.id, "type": self.kind, "status": status, "content": content, **own}


class _Call:
    """A call of a function that is being made. `index`: chat's number of it."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.index = index
        self.id = new_id("fc")
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []

    def item(self, status: str) -> Item:
        call = {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function_call", "status": status, **call}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
