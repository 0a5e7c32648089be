"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.frontend.outputs import Delta, LogprobEntry
from octavo.frontend.requests import Prepared
from octavo.frontend.tools import parse_tools, reading_of
from octavo.server.auth import tenant_of
from octavo.server.context import Context, client_request_id
from octavo.server.generation import (
    Ids,
    UsageCount,
    check_count,
    finite,
    json_response,
    prompt_logprobs_json,
    stream,
    stream_interval,
    stream_options,
    token_string,
    truncation,
    whole,
)
from octavo.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatTopLogprob,
    StreamOptions,
)
from octavo.server.reader import MessageReader


async def chat_completions(context: Context, request: Request) -> ASGIApp:
    """POST /v1/chat/completions: answers a conversation, as OpenAI's API does."""
    body, size = await context.body(request, ChatCompletionRequest)
    model = context.model_name(body.model)
    options = stream_options(body.stream, body.stream_options)
    headers = {"x-request-id": echoed} if (echoed := client_request_id(request, body.request_id)) else {}
    interval = stream_interval(body.stream, body.stream_interval)
    prepared = await context.off_loop(size, lambda: prepare_chat(context, request, body))
    ids, usage = Ids("chatcmpl", model), UsageCount([prepared])
    if not body.stream:
        return await _whole(context, request, body, prepared, ids, usage, headers)
    answer = ChatStream(context, body, prepared, ids, usage, options)

    async def last() -> list[ChatChunk]:
        return [ChatChunk(**ids.fields(), choices=[], usage=usage.usage())] if options.include_usage else []

    return await stream(context, request, [prepared], lambda _, delta: answer.chunks(delta), last, headers, interval)


class ChatStream:
    """One request's answer as chunks. The other APIs that answer conversations are made of them."""

    def __init__(
        self,
        context: Context,
        body: ChatCompletionRequest,
        prepared: Prepared,
        ids: Ids,
        usage: UsageCount,
        options: StreamOptions,
    ) -> None:
        self._context = context
        self._body = body
        self._prepared = prepared
        self._ids = ids
        self._usage = usage
        self._options = options
        self._started: set[int] = set()
        self._readers = [reader_of(prepared, body) for _ in range(prepared.num_choices)]

    def chunks(self, delta: Delta) -> Iterator[ChatChunk]:
        """What one delta adds to the answer."""
        body, prepared = self._body, self._prepared
        self._usage.take(0, delta)
        quiet_usage = None if self._options.include_usage else UNSET
        now = self._usage.usage() if self._options.continuous_usage_stats else quiet_usage
        if delta.index not in self._started:
            first = not self._started
            self._started.add(delta.index)
            yield ChatChunk(
                **self._ids.fields(),
                choices=[ChatChunkChoice(index=delta.index, delta=ChatDelta(role="assistant", content=_echo(body)))],
                usage=now,
                prompt_token_ids=prepared.prompt_token_ids if first and body.return_token_ids else UNSET,
                prompt_text=_prompt_text(self._context, prepared) if first and body.return_prompt_text else UNSET,
                prompt_logprobs=prompt_logprobs_json(delta.prompt_logprobs)
                if first and delta.prompt_logprobs is not None
                else UNSET,
            )
        reader = self._readers[delta.index]
        added = reader.deltas(delta.text, last=delta.finish_reason is not None)
        if delta.finish_reason or delta.logprobs or (delta.token_ids and body.return_token_ids):
            added = added or [ChatDelta()]
        for number, one in enumerate(added, start=1):
            first, ends = number == 1, number == len(added) and delta.finish_reason is not None
            choice = ChatChunkChoice(
                index=delta.index,
                delta=one,
                logprobs=_logprobs(delta.logprobs, body) if first and delta.logprobs else None,
                finish_reason=reader.finish_reason(delta.finish_reason) if ends and delta.finish_reason else None,
                stop_reason=delta.stop_reason if ends else UNSET,
                token_ids=(delta.token_ids if first else ()) if body.return_token_ids else UNSET,
            )
            yield ChatChunk(**self._ids.fields(), choices=[choice], usage=now)


def prepare_chat(context: Context, request: Request, body: ChatCompletionRequest) -> Prepared:
    """Checks a request and renders its conversation. Raises InvalidRequestError and its kin."""
    if (
        body.max_tokens is not None
        and body.max_completion_tokens is not None
        and body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    check_count("top_logprobs", body.top_logprobs, context.model.max_logprobs)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is true; a chat template writes its own special tokens", param="add_special_tokens"
        )
    params = msgspec.structs.replace(
        body.sampling(context.model.default_sampling, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        max_tokens=limit,
    )
    return context.engine.builder.build_chat(
        body.messages,
        params,
        add_generation_prompt=body.add_generation_prompt
        if body.add_generation_prompt is not None
        else not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=_template_kwargs(context, body),
        tenant=tenant_of(request),
        priority=body.priority or 0,
        timeouts=body.timeouts,
        cache_salt=body.cache_salt,
        cache_pin=bool(body.cache_pin),
        truncation=truncation(body),
        reading=reading_of(
            context.model, parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls), body.grammar
        ),
    )


def tokenize_chat(context: Context, body: ChatCompletionRequest) -> list[int]:
    """The ids of a request's prompt, as `prepare_chat` makes them. Raises InvalidRequestError and its kin."""
    return context.engine.builder.tokenize_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt
        if body.add_generation_prompt is not None
        else not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=_template_kwargs(context, body),
        tools=parse_tools(body.tools, body.tool_choice, body.parallel_tool_calls).told,
    )


def reader_of(prepared: Prepared, body: ChatCompletionRequest) -> MessageReader:
    """A reader for one choice of the answer."""
    return MessageReader(prepared.reading, with_reasoning=body.include_reasoning is not False)


def _template_kwargs(context: Context, body: ChatCompletionRequest) -> dict[str, Any]:
    """The template's variables that have request fields of their own. One that the template does not look at would be ignored, so
    it is refused.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    template = context.model.chat_template

    def give(field: str, name: str, value: Any) -> None:
        if name in kwargs:
            raise InvalidRequestError(f"{field} and chat_template_kwargs.{name} are both given; give one", param=field)
        kwargs[name] = value

    if template is None:
        return kwargs
    if body.documents:
        if not template.mentions("documents"):
            raise UnsupportedFieldError(
                "documents: this model's chat template has no place for them", param="documents"
            )
        give("documents", "documents", body.documents)
    if body.reasoning_effort is not None:
        if template.mentions("reasoning_effort"):
            give("reasoning_effort", "reasoning_effort", body.reasoning_effort)
        elif template.mentions("enable_thinking"):
            give("reasoning_effort", "enable_thinking", body.reasoning_effort != "none")
        elif body.reasoning_effort != "none":
            raise UnsupportedFieldError(
                "reasoning_effort: this model's chat template does not reason; leave it out", param="reasoning_effort"
            )
    return kwargs


def _echo(body: ChatCompletionRequest) -> str:
    """With echo, the beginning of the assistant's message that the request gave."""
    last = body.messages[-1] if body.messages else {}
    if not body.echo or not body.continue_final_message or last.get("role") != "assistant":
        return ""
    content = last.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())


async def _whole(
    context: Context,
    request: Request,
    body: ChatCompletionRequest,
    prepared: Prepared,
    ids: Ids,
    usage: UsageCount,
    headers: dict[str, str],
) -> ASGIApp:
    deltas: list[list[Delta]] = [[] for _ in range(prepared.num_choices)]

    def take(_: int, delta: Delta) -> None:
        usage.take(0, delta)
        deltas[delta.index].append(delta)

    await whole(context, request, [prepared], take)
    prompt_logprobs = deltas[0][0].prompt_logprobs

    def build() -> ChatCompletion:
        return ChatCompletion(
            **ids.fields(),
            choices=[_choice(index, of_choice, prepared, body) for index, of_choice in enumerate(deltas)],
            usage=usage.usage(),
            prompt_logprobs=prompt_logprobs_json(prompt_logprobs) if prompt_logprobs is not None else UNSET,
            prompt_token_ids=prepared.prompt_token_ids if body.return_token_ids else UNSET,
            prompt_text=_prompt_text(context, prepared) if body.return_prompt_text else UNSET,
        )

    return await json_response(build, headers, [prepared])


def _prompt_text(context: Context, prepared: Prepared) -> str:
    if prepared.prompt is not None:
        return prepared.prompt
    return context.model.tokenizer.decode(prepared.prompt_token_ids, skip_special_tokens=False)


def _choice(index: int, deltas: Sequence[Delta], prepared: Prepared, body: ChatCompletionRequest) -> ChatChoice:
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    reader, reason = reader_of(prepared, body), deltas[-1].finish_reason
    assert reason is not None
    return ChatChoice(
        index=index,
        message=reader.message("".join(delta.text for delta in deltas), before=_echo(body)),
        logprobs=_logprobs(entries, body) if body.logprobs else None,
        finish_reason=reader.finish_reason(reason),
        stop_reason=deltas[-1].stop_reason,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids) if body.return_token_ids else UNSET,
    )


def _logprobs(entries: Sequence[LogprobEntry], body: ChatCompletionRequest) -> ChatLogprobs:
    as_id = bool(body.return_tokens_as_token_ids)
    count = None if body.top_logprobs == -1 else body.top_logprobs or 0
    return ChatLogprobs(
        [
            ChatLogprob(
                token_string(entry.token, entry.token_id, as_id),
                finite(entry.logprob),
                list(entry.bytes),
                [
                    ChatTopLogprob(token_string(top.token, top.token_id, as_id), finite(top.logprob), list(top.bytes))
                    for top in entry.top[:count]
                ],
            )
            for entry in entries
        ]
    )
