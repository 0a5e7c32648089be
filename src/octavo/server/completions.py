"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from octavo.contracts import FinishReason
from octavo.errors import InvalidRequestError
from octavo.frontend.outputs import Delta, LogprobEntry
from octavo.frontend.requests import Prepared
from octavo.limits import MAX_CHOICES, MAX_PROMPTS
from octavo.server.auth import tenant_of
from octavo.server.context import Context, client_request_id
from octavo.server.generation import (
    Ids,
    UsageCount,
    check_count,
    finite,
    json_response,
    more,
    prompt_logprobs_json,
    stream,
    stream_interval,
    stream_options,
    token_string,
    truncation,
    whole,
)
from octavo.server.protocol import CompletionRequest, TextChoice, TextCompletion, TextLogprobs


async def completions(context: Context, request: Request) -> ASGIApp:
    """POST /v1/completions: continues one prompt or several, as OpenAI's API does."""
    body, size = await context.body(request, CompletionRequest)
    model = context.model_name(body.model)
    options = stream_options(body.stream, body.stream_options)
    headers = {"x-request-id": echoed} if (echoed := client_request_id(request, body.request_id)) else {}
    interval = stream_interval(body.stream, body.stream_interval)
    prepared = await context.off_loop(size, lambda: _prepare(context, request, body))
    ids, usage = Ids("cmpl", model), UsageCount(prepared)
    writers = [_Writer(context, body, one) for one in prepared for _ in range(one.num_choices)]
    num_choices, num_wanted = prepared[0].num_choices, body.n or 1

    def shaped(prompt: int, delta: Delta) -> Delta:
        if body.max_tokens == 0:  # only the prompt was asked for: one token was computed to get there, nobody sees it
            end = (
                FinishReason.LENGTH
                if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                else delta.finish_reason
            )
            delta = Delta(
                delta.index,
                prompt_logprobs=delta.prompt_logprobs,
                num_cached_tokens=delta.num_cached_tokens,
                finish_reason=end,
            )
        usage.take(prompt, delta)
        return delta

    if not body.stream:
        deltas: list[list[Delta]] = [[] for _ in writers]

        def take(prompt: int, delta: Delta) -> None:
            deltas[prompt * num_choices + delta.index].append(shaped(prompt, delta))

        def build() -> TextCompletion:
            best = [
                number
                for begin in range(0, len(deltas), num_choices)
                for number in _best(range(begin, begin + num_choices), deltas, num_wanted)
            ]
            choices = [
                _joined([writers[number].choice(index, delta) for delta in deltas[number]])
                for index, number in enumerate(best)
            ]
            return TextCompletion(**ids.fields(), choices=choices, usage=usage.usage())

        await whole(context, request, prepared, take)
        return await json_response(build, headers, prepared)

    quiet_usage = None if options.include_usage else UNSET

    def render(prompt: int, delta: Delta) -> Iterable[msgspec.Struct]:
        delta = shaped(prompt, delta)
        index = prompt * num_choices + delta.index
        choice = writers[index].choice(index, delta)
        if choice.text or choice.finish_reason or choice.logprobs or (delta.token_ids and body.return_token_ids):
            now = usage.usage() if options.continuous_usage_stats else quiet_usage
            yield TextCompletion(**ids.fields(), choices=[choice], usage=now)

    async def last() -> list[TextCompletion]:
        return [TextCompletion(**ids.fields(), choices=[], usage=usage.usage())] if options.include_usage else []

    return await stream(context, request, prepared, render, last, headers, interval)


def _prompts(prompt: str | list[object]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    error = InvalidRequestError(
        "prompt must be a text, a list of token ids, or a list of either, without mixing", param="prompt"
    )
    if not prompt:
        raise InvalidRequestError("prompt is an empty list", param="prompt")
    if all(_is_id(item) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)  # type: ignore[arg-type]
    if all(isinstance(item, list) and all(_is_id(token) for token in item) for item in prompt):
        return list(prompt)  # type: ignore[arg-type]
    raise error


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _prepare(context: Context, request: Request, body: CompletionRequest) -> list[Prepared]:
    prompts = _prompts(body.prompt)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens < 0 or (max_tokens == 0 and not body.echo):
        raise InvalidRequestError(
            f"max_tokens is {max_tokens}; it must be at least 1 (0 with echo)", param="max_tokens"
        )
    check_count("logprobs", body.logprobs, context.model.max_logprobs)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = more(body.logprobs, prompt_logprobs or 0)
    num_choices = _num_choices(body)
    params = body.sampling(
        context.model.default_sampling,
        n=num_choices,
        logprobs=0 if body.logprobs is None and (body.best_of or 0) > (body.n or 1) else body.logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max(max_tokens, 1),
    )
    return [
        context.engine.builder.build(
            prompt,
            params,
            tenant=tenant_of(request),
            priority=body.priority or 0,
            timeouts=body.timeouts,
            cache_salt=body.cache_salt,
            cache_pin=bool(body.cache_pin),
            add_special_tokens=body.add_special_tokens is not False,
            truncation=truncation(body),
            grammar=body.grammar,
        )
        for prompt in prompts
    ]


def _num_choices(body: CompletionRequest) -> int | None:
    """Choices to generate for each prompt. Raises InvalidRequestError."""
    wanted = body.n or 1
    if body.best_of is None:
        return body.n
    if body.best_of < wanted:
        raise InvalidRequestError(
            f"best_of is {body.best_of}; it must be from n ({wanted}) to {MAX_CHOICES}", param="best_of"
        )
    if body.stream and body.best_of > wanted:
        raise InvalidRequestError("best_of beyond n cannot be streamed: the best is known at the end", param="best_of")
    return body.best_of


def _best(numbers: range, deltas: Sequence[Sequence[Delta]], count: int) -> Sequence[int]:
    """The choices with the highest logprob per token, the best first; all of them as they are if no more are wanted."""
    if count >= len(numbers):
        return numbers

    def score(number: int) -> float:
        logprobs = [entry.logprob for delta in deltas[number] for entry in delta.logprobs or ()]
        return sum(logprobs) / max(len(logprobs), 1)

    return sorted(numbers, key=score, reverse=True)[:count]


class _Writer:
    """Turns the deltas of one choice into choices of chunks, echoing the prompt before the first."""

    def __init__(self, context: Context, body: CompletionRequest, prepared: Prepared) -> None:
        self._body = body
        self._prepared = prepared
        self._tokenizer = context.model.tokenizer
        self._offset = 0
        self._first = True

    def choice(self, index: int, delta: Delta) -> TextChoice:
        body = self._body
        text, entries = delta.text, list(delta.logprobs or ())
        lists: list[LogprobEntry | None] = [*entries]
        prompt_ids: tuple[int, ...] | UnsetType = UNSET
        prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET
        if self._first:
            self._first = False
            if body.echo:
                prompt = self._prepared.prompt
                if prompt is None:
                    prompt = self._tokenizer.decode(self._prepared.prompt_token_ids, skip_special_tokens=False)
                text = prompt + text
                lists = [*(delta.prompt_logprobs or ()), *entries]
            if body.return_token_ids:
                prompt_ids = self._prepared.prompt_token_ids
            if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                prompt_logprobs = prompt_logprobs_json(delta.prompt_logprobs)
        return TextChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(lists) if body.logprobs is not None and lists else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=delta.token_ids if body.return_token_ids else UNSET,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=prompt_logprobs,
        )

    def _logprobs(self, entries: Sequence[LogprobEntry | None]) -> TextLogprobs:
        as_id = bool(self._body.return_tokens_as_token_ids)
        result = TextLogprobs([], [], [], [])
        for entry in entries:
            if entry is None:  # the first prompt token: nothing predicts it
                token_id = self._prepared.prompt_token_ids[0]
                token, logprob, tops = self._tokenizer.token_text(token_id), None, None
            else:
                token_id, token, logprob = entry.token_id, entry.token, finite(entry.logprob)
                count = self._body.logprobs or 0
                shown = entry.top if count == -1 else entry.top[:count]
                tops = {token_string(top.token, top.token_id, as_id): finite(top.logprob) for top in shown}
                tops.setdefault(token_string(token, token_id, as_id), logprob)
            result.tokens.append(token_string(token, token_id, as_id))
            result.token_logprobs.append(logprob)
            result.top_logprobs.append(tops)
            result.text_offset.append(self._offset)
            self._offset += len(token)
        return result


def _joined(parts: Sequence[TextChoice]) -> TextChoice:
    """One choice of all its chunks."""
    logprobs = None
    if any(part.logprobs for part in parts):
        logprobs = TextLogprobs(
            *(
                [item for p in parts if p.logprobs for item in getattr(p.logprobs, name)]
                for name in TextLogprobs.__struct_fields__
            )
        )
    token_ids: tuple[int, ...] | UnsetType = UNSET
    if parts[0].token_ids is not UNSET:
        token_ids = tuple(token for part in parts if part.token_ids is not UNSET for token in part.token_ids)
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        logprobs=logprobs,
        token_ids=token_ids,
        prompt_token_ids=parts[0].prompt_token_ids,
        prompt_logprobs=parts[0].prompt_logprobs,
    )
