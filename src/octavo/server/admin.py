"""Routes for who runs the server: the prefix cache. They need `--admin-api-key`; without one they are refused."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequestError
from octavo.frontend.outputs import Delta
from octavo.frontend.params import SamplingParams
from octavo.server.auth import tenant_of
from octavo.server.context import Context
from octavo.server.generation import whole
from octavo.server.protocol import PinRequest, UnpinRequest

ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"})
"""Paths that take the admin key instead of an API key. Compared with the decoded path, exactly."""


class PinBudgetError(InvalidRequestError):
    """The pinned prefixes leave no room for another one."""

    code = "pin_budget_exhausted"
    http_status = 409


async def reset_prefix_cache(context: Context, request: Request) -> Response:
    """POST /reset_prefix_cache: forgets all cached blocks that no request holds, pinned ones and those on disk included."""
    context.engine.reset_prefix_cache()
    return _json({})


async def pin_prefix(context: Context, request: Request) -> Response:
    """POST /pin_prefix: computes a prompt, or finds it cached, and keeps its full blocks until they are unpinned."""
    body, size = await context.body(request, PinRequest)
    context.model_name(body.model)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    token_ids = await context.off_loop(size, lambda: _prefix(context, body))
    block_size = context.config.cache.block_size
    if len(token_ids) < block_size:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens; only blocks of {block_size} are kept", param="prompt"
        )
    prepared = context.engine.builder.build(
        token_ids, params, tenant=tenant_of(request), cache_salt=body.cache_salt, cache_pin=True
    )
    pinned = 0

    def take(_: int, delta: Delta) -> None:
        nonlocal pinned
        pinned = delta.num_pinned_tokens or pinned

    await whole(context, request, [prepared], take)
    if not pinned:
        raise PinBudgetError(
            f"{len(token_ids)} tokens do not fit beside what is pinned (--max-pinned-tokens {context.model.max_pinned_tokens}); "
            "unpin something first"
        )
    return _json({"prompt_tokens": len(token_ids), "pinned_tokens": pinned})


async def unpin_prefix(context: Context, request: Request) -> Response:
    """POST /unpin_prefix: lets go of a prompt that was pinned, or with an empty object of all. What is not pinned is no error."""
    body, size = await context.body(request, UnpinRequest)
    context.model_name(body.model)
    if body.prompt is None and body.messages is None:
        if body.cache_salt is not None:
            raise InvalidRequestError("cache_salt is only allowed with prompt or messages", param="cache_salt")
        context.engine.unpin_prefix(None)
    else:
        token_ids = await context.off_loop(size, lambda: _prefix(context, body))
        context.engine.unpin_prefix(tuple(token_ids), cache_salt=body.cache_salt)
    return _json({})


def _prefix(context: Context, body: PinRequest) -> list[int]:
    """The tokens that prompts begin with: of a text, of ids, or of the messages without what asks for an answer."""
    builder = context.engine.builder
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise InvalidRequestError("add_special_tokens is only allowed with prompt", param="add_special_tokens")
        return builder.tokenize_chat(
            body.messages, add_generation_prompt=False, chat_template_kwargs=body.chat_template_kwargs
        )
    if body.chat_template_kwargs is not None:
        raise InvalidRequestError("chat_template_kwargs is only allowed with messages", param="chat_template_kwargs")
    if isinstance(body.prompt, str):
        return builder.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    if body.add_special_tokens is not None:
        raise InvalidRequestError("add_special_tokens is only allowed with a text", param="add_special_tokens")
    return list(builder.check_token_ids("prompt", body.prompt or ()))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
