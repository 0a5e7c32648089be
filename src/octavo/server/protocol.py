"""Request and response structs of the HTTP API, and their strict decoding.

Every field is implemented, or refused by name. Names are OpenAI's, extensions vLLM's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from octavo.errors import InvalidRequestError, RequestTooLargeError, UnsupportedFieldError
from octavo.frontend.params import SamplingParams
from octavo.frontend.requests import Timeouts
from octavo.frontend.structured import StructuredOutputsParams, response_format_spec
from octavo.grammar import GrammarSpec
from octavo.limits import MAX_JSON_DEPTH, MAX_JSON_PARTS, is_deeper
from octavo.server.fields import (
    Alternatives,
    AnswerFields,
    Choices,
    ReasoningEffort,
    TokenIds,
    Tokens,
    TokensOrNone,
)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: one chunk with usage before [DONE]. `continuous_usage_stats`: usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Generation(AnswerFields, frozen=True, kw_only=True):
    """Fields that chat and text completions share. None means not given."""

    max_tokens: TokensOrNone | None = None
    n: Choices | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Alternatives | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Alternatives | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer must be, by whichever of its fields says so. Raises InvalidRequestError."""
        given = [name for name in _FORM_FIELDS if getattr(self, name) is not None]
        specs = [(name, spec) for name in given if (spec := self._form(name)) is not None]
        if len(specs) > 1:
            raise InvalidRequestError(f"give {specs[0][0]} or {specs[1][0]}, not both", param=specs[1][0])
        return specs[0][1] if specs else None

    @property
    def timeouts(self) -> Timeouts:
        """The request's own limits on waiting, prefill and decode. Raises InvalidRequestError."""
        return Timeouts(self.waiting_timeout, self.prefill_timeout, self.decode_timeout)

    def _form(self, name: str) -> GrammarSpec | None:
        value = getattr(self, name)
        if name == "response_format":
            return response_format_spec(value)
        fields = value if name == "structured_outputs" else {name.removeprefix("guided_"): value}
        try:
            return msgspec.convert(fields, StructuredOutputsParams).spec(name)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{name}: {error}", param=name) from None

    def sampling(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """Sampling parameters: the request's values, else the model's defaults, else OpenAI's."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        return SamplingParams(**{**defaults, **given, **{k: v for k, v in own.items() if v is not None}})


_SAMPLING_FIELDS = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "n", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "allowed_token_ids", "bad_words",
    "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
)  # fmt: skip


_FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


class ChatCompletionRequest(_Generation, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None


class CompletionRequest(_Generation, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either. Of `best_of` choices the `n` likeliest per token are given."""

    prompt: str | list[Any]
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: of a `prompt` (control tokens recognised) or of chat `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class PinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /pin_prefix: a `prompt` (text or token ids) or chat `messages`, whose full KV blocks are to stay cached."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class UnpinRequest(PinRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /unpin_prefix: what was given to /pin_prefix, or nothing for all that is pinned."""


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


# Fields that exist in the API but that this server does not have. A neutral value is no request for the feature.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "web_search_options": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "logprob_token_ids": (),
    "return_token_offsets": (False,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
    "vllm_xargs": (),
    "watermarking": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (),
    "moderation": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
}


def not_built_fields(kind: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """Fields of a request that are known and refused, with the values that ask for nothing."""
    own: Mapping[str, tuple[Any, ...]] | None = getattr(kind, "not_built", None)
    return own if own is not None else _NOT_BUILT if issubclass(kind, _Generation) else {}


R = TypeVar("R", bound=msgspec.Struct)

_TEXT = re.compile(rb'"[^"]*+"?')


def decode(body: bytes, kind: type[R]) -> R:
    """Decodes a request body.

    Raises InvalidRequestError that names the field: malformed JSON, NaN or lone surrogates, wrong types, unknown or missing
    fields; UnsupportedFieldError for a field of the API that is not built; RequestTooLargeError for so many parts that to make
    objects of them would hold up everybody else.
    """
    if _has_too_many_parts(body):
        raise RequestTooLargeError(
            f"the body has more than {MAX_JSON_PARTS} lists, objects and members of objects in all"
        )
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"the body is a JSON {type(raw).__name__}; expected an object")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and is_deeper(raw, MAX_JSON_DEPTH):
        raise InvalidRequestError(f"the body is nested more than {MAX_JSON_DEPTH} levels deep")
    known = kind.__struct_fields__
    not_built = not_built_fields(kind)
    for name in [name for name in raw if name not in known]:
        if name in not_built:
            value = raw.pop(name)
            if value is not None and not _is_neutral(value, not_built[name]):
                raise UnsupportedFieldError(f"{name} is not supported by this server", param=name)
        else:
            near = difflib.get_close_matches(name[:80], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidRequestError(f"unknown field {name[:80]!r}{hint}", param=name[:80])
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{error}", param=_field_of(str(error))) from None


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of those that ask for nothing; to JSON, unlike to Python, true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _has_too_many_parts(body: bytes) -> bool:
    """Counts without building anything. Texts may be full of brackets, so they are left out where that decides it."""
    if _num_parts(body) <= MAX_JSON_PARTS:
        return False
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return unescaped.count(b'"') > 2 * MAX_JSON_PARTS or _num_parts(_TEXT.sub(b"", unescaped)) > MAX_JSON_PARTS


def _num_parts(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _field_of(message: str) -> str | None:
    """The top-level field of a msgspec message such as "Expected `int`, got `str` - at `$.n`"."""
    _, found, path = message.partition("`$.")
    if found:
        return path.split("`")[0].split(".")[0].split("[")[0] or None
    _, found, name = message.partition("required field `")
    return name.split("`")[0] if found else None


# --- responses ------------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache, and, if the request asked to pin them, how many are pinned now."""

    cached_tokens: int
    pinned_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request: the prompt once, completions of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """One generated token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a chat choice or delta."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """What a tool call calls. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's answer. `reasoning` stands also under its other name, by which as many clients know it."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a whole chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a call: the name once, in the first."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the call number `index`: id and type once, in the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A server-sent event of a chat stream. `usage` is null in all chunks but the last when usage was asked for. What is told of the
    prompt stands in the first chunk."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class TextLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a text completion: four arrays of equal length. The first prompt token of an echo has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a text completion, whole or in a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, whole or a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of GET /v1/models."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "octavo"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
