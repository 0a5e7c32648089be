"""Routes beside generation: models, tokens, health, version, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.errors import EngineDeadError, InvalidRequestError, NotReadyError
from octavo.frontend.engine import EngineState
from octavo.frontend.tools import parse_tools
from octavo.obs.metrics import CONTENT_TYPE, Metrics
from octavo.server.context import Context
from octavo.server.protocol import DetokenizeRequest, ModelCard, ModelList, TokenizeRequest


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def live(context: Context, request: Request) -> Response:
    """GET /live: the process answers."""
    return _json({"status": "alive"})


async def ready(context: Context, request: Request) -> Response:
    """GET /ready and /health: 200 while the model serves; 503 while it loads, drains or after the engine died."""
    state = context.engine.state
    if state is EngineState.READY:
        return _json({"status": state})
    raise (EngineDeadError if state is EngineState.DEAD else NotReadyError)(f"the engine is {state}")


async def version(context: Context, request: Request) -> Response:
    """GET /version: the version of octavo."""
    return _json({"version": octavo.__version__})


async def models(context: Context, request: Request) -> Response:
    """GET /v1/models: the model by all its names."""
    return _json(ModelList(_cards(context)))


async def one_model(context: Context, request: Request) -> Response:
    """GET /v1/models/{name}: the model by one of its names, which may hold slashes."""
    name = context.model_name(request.path_params["name"])
    return _json(next(card for card in _cards(context) if card.id == name))


def _cards(context: Context) -> list[ModelCard]:
    model = context.model
    return [
        ModelCard(id=name, created=model.created, max_model_len=model.max_model_len, root=model.names[0])
        for name in model.names
    ]


async def tokenize(context: Context, request: Request) -> Response:
    """POST /tokenize: token ids of a text or a conversation."""
    body, size = await context.body(request, TokenizeRequest)
    context.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
        if body.messages is None and getattr(body, name) is not None:
            raise InvalidRequestError(f"{name} is only allowed with messages", param=name)
    return await context.off_loop(size, lambda: _json(_tokenized(context, body)))


def _tokenized(context: Context, body: TokenizeRequest) -> dict[str, Any]:
    ids = _tokens(context, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": context.model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [context.model.tokenizer.token_text(token) for token in ids]
    return answer


def _tokens(context: Context, body: TokenizeRequest) -> list[int]:
    builder = context.engine.builder
    if body.prompt is not None:
        return builder.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    assert body.messages is not None
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is true; a chat template writes its own special tokens", param="add_special_tokens"
        )
    return builder.tokenize_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt
        if body.add_generation_prompt is not None
        else not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        tools=parse_tools(body.tools, None, None).told,
    )


async def detokenize(context: Context, request: Request) -> Response:
    """POST /detokenize: the text of token ids."""
    body, size = await context.body(request, DetokenizeRequest)
    context.model_name(body.model)
    return await context.off_loop(size, lambda: _json({"prompt": _text(context, body.tokens)}))


def _text(context: Context, token_ids: list[int]) -> str:
    vocab_size = context.model.vocab_size
    if unknown := next((token for token in token_ids if not 0 <= token < vocab_size), None):
        raise InvalidRequestError(f"tokens holds {unknown}; ids are 0 to {vocab_size - 1}", param="tokens")
    return context.model.tokenizer.decode(token_ids, skip_special_tokens=False)


class MetricsRoute:
    """GET /metrics: all metrics, for Prometheus."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, context: Context, request: Request) -> Response:
        """Renders all metrics."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)
