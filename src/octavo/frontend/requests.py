"""From text and parameters to `GenerateRequest`s: the last place that sees text, and the door for everything that
needs the model.

Knows no HTTP and no engine. Everything here is pure computation on the caller's thread.
"""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from octavo.contracts import GenerateRequest, RequestId, TokenSampling
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.frontend.model import ServedModel
from octavo.frontend.params import SamplingParams
from octavo.frontend.tools import NO_TOOLS, PLAIN, Reading, reading_of
from octavo.grammar import GrammarSpec
from octavo.limits import MAX_PRIORITY, MAX_SALT_CHARACTERS
from octavo.text.template import ChatPrompt, encode_chat


@dataclass(frozen=True, slots=True)
class Truncation:
    """A wish to have an over-long prompt cut to `count` tokens, -1 for as many as leave room for the answer. "left" drops its
    beginning, "right" its end.
    """

    count: int
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request: n engine requests with one prompt. `prompt` is the rendered text, None when ids were given or it was
    cut. `grammar` constrains the output; the requests have its source only once it has been compiled. `reading` says how an answer
    to a conversation is read.
    """

    requests: tuple[GenerateRequest, ...]
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    grammar: GrammarSpec | None = None
    reading: Reading = PLAIN

    @property
    def num_choices(self) -> int:
        """Sequences this request runs."""
        return len(self.requests)


def cache_namespace(cache_salt: str | None) -> bytes:
    """What keeps the cached blocks of a salt apart from those of others."""
    return b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of a request in seconds: until it first runs, from then to its first token, from that to its end. None: the server's alone.

    Raises InvalidRequestError for one that is no positive number.
    """

    waiting_timeout: float | None = None
    prefill_timeout: float | None = None
    decode_timeout: float | None = None

    def __post_init__(self) -> None:
        for field in ("waiting_timeout", "prefill_timeout", "decode_timeout"):
            value = getattr(self, field)
            if value is not None and not 0.0 < value < math.inf:
                raise InvalidRequestError(f"{field} is {value}; it must be a number of seconds above 0", param=field)


class RequestBuilder:
    """Builds and validates requests for one model. Bad input raises InvalidRequestError or one of its kin, nothing
    else. `priorities`: whether the scheduler looks at priorities; if not, any but 0 is refused.
    """

    def __init__(self, model: ServedModel, *, priorities: bool = True) -> None:
        self.model = model
        self._priorities = priorities

    def build(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "default",
        priority: int = 0,
        timeouts: Timeouts | None = None,
        cache_salt: str | None = None,
        cache_pin: bool = False,
        arrival_s: float | None = None,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
        grammar: GrammarSpec | None = None,
    ) -> Prepared:
        """A completion of a text or of token ids. `grammar` constrains it where the parameters do not.

        An empty prompt is refused unless the tokenizer puts a beginning-of-sequence token before it; an over-long one
        is refused, never cut unless `truncation` asks for it. `cache_salt` keeps the prompt's cached blocks apart from
        those of other salts. Raises InvalidRequestError, ContextLengthError.
        """
        if isinstance(prompt, str):
            text: str | None = prompt
            if truncation is None:
                self.check_characters(len(prompt))
            token_ids = tuple(self.model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        else:
            text = None
            token_ids = self.check_token_ids("prompt", prompt, bounded=truncation is None)
        text, token_ids = self._truncated(text, token_ids, params, truncation)
        return self._prepare(
            text, token_ids, params, tenant, priority, timeouts, cache_salt, cache_pin, arrival_s, Reading(form=grammar)
        )

    def build_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reading: Reading | None = None,
        tenant: str = "default",
        priority: int = 0,
        timeouts: Timeouts | None = None,
        cache_salt: str | None = None,
        cache_pin: bool = False,
        arrival_s: float | None = None,
        truncation: Truncation | None = None,
    ) -> Prepared:
        """An answer to a conversation, through the model's chat template. `reading`: its tools and form, by `reading_of`.

        Raises InvalidRequestError also when the model has no usable template, ContextLengthError.
        """
        reading = reading or reading_of(self.model, NO_TOOLS, None)
        prompt = self._render(
            messages,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            reading.tools.told,
            bounded=truncation is None,
        )
        continued = str(messages[-1].get("content")) if continue_final_message else ""
        reading = reading.after(prompt.text, continued)
        text, token_ids = self._truncated(prompt.text, tuple(prompt.token_ids), params, truncation)
        return self._prepare(
            text, token_ids, params, tenant, priority, timeouts, cache_salt, cache_pin, arrival_s, reading
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text as `build` makes them. Raises InvalidRequestError, ContextLengthError for far too long a
        text.
        """
        self.check_characters(len(text))
        return self.model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a conversation as `build_chat` makes them. Raises as it does."""
        return self._render(
            messages, add_generation_prompt, continue_final_message, chat_template_kwargs, tools
        ).token_ids

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        bounded: bool = True,
    ) -> ChatPrompt:
        template = self.model.chat_template
        if template is None:
            problem = self.model.chat_template_error or "this model has no chat template"
            raise InvalidRequestError(problem, param="messages")
        if bounded:
            self.check_characters(sum(_count_characters(message) for message in messages))
        return encode_chat(
            self.model.tokenizer,
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=chat_template_kwargs,
        )

    def _truncated(
        self, text: str | None, token_ids: tuple[int, ...], params: SamplingParams, truncation: Truncation | None
    ) -> tuple[str | None, tuple[int, ...]]:
        """The prompt as the caller wants it cut; a cut one is no longer the text. A beginning-of-sequence token stays."""
        if truncation is None:
            return text, token_ids
        count = truncation.count
        if count == -1:
            count = max(self._limit - (params.max_tokens or 1), 1)
        if not 1 <= count <= self._limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {truncation.count}; it must be -1 or from 1 to {self._limit}",
                param="truncate_prompt_tokens",
            )
        if len(token_ids) <= count:
            return text, token_ids
        if truncation.side == "right":
            return None, token_ids[:count]
        head = token_ids[:1] if token_ids[0] == self.model.tokenizer.bos_token_id else ()
        return None, head + token_ids[len(token_ids) - count + len(head) :]

    def check_token_ids(self, field: str, token_ids: Iterable[Any], *, bounded: bool = True) -> tuple[int, ...]:
        """The ids as a tuple, every one known to the model. Raises InvalidRequestError, ContextLengthError for too
        many of a prompt that is to be `bounded`.
        """
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidRequestError(f"{field} must be a text or a list of token ids", param=field)
        if field == "prompt" and bounded and len(token_ids) > self._limit:
            raise self._too_long(len(token_ids), None)
        vocab_size = self.model.vocab_size
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"{field} holds {token!r:.40}: token ids are integers from 0 to {vocab_size - 1}", param=field
                )
        return tuple(token_ids)

    def check_characters(self, count: int) -> None:
        """Refuses a text that cannot fit the context before time is spent on its tokens. Raises ContextLengthError."""
        most = self.model.max_model_len * self.model.tokenizer.max_token_characters
        if count > most:
            raise ContextLengthError(
                f"the prompt has {count} characters, but the context of {self.model.max_model_len} tokens holds at most "
                f"{most}: shorten the prompt",
                param="prompt",
            )

    def _prepare(
        self,
        text: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        tenant: str,
        priority: int,
        timeouts: Timeouts | None,
        cache_salt: str | None,
        cache_pin: bool,
        arrival_s: float | None,
        reading: Reading,
    ) -> Prepared:
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
        if not -MAX_PRIORITY <= priority < MAX_PRIORITY:
            raise InvalidRequestError("priority must be a 32-bit integer", param="priority")
        if priority != 0 and not self._priorities:
            raise InvalidRequestError(
                f"priority is {priority}, but this server does not schedule by priority (--scheduling-policy priority): leave it out",
                param="priority",
            )
        if cache_salt is not None and not (isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_SALT_CHARACTERS):
            raise InvalidRequestError(
                f"cache_salt must be a text of 1 to {MAX_SALT_CHARACTERS} characters", param="cache_salt"
            )
        if cache_pin:
            self._check_pin(len(token_ids))
        sampling = self._sampling(params, len(token_ids))
        if params.grammar is not None:
            reading = replace(reading, form=params.grammar)
        grammar = reading.grammar
        if grammar is not None and params.ignore_eos:
            raise InvalidRequestError(
                f"ignore_eos and {grammar.field} exclude each other: the form says where the output ends",
                param="ignore_eos",
            )
        parent = uuid.uuid4().hex
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        timeouts = timeouts or Timeouts()
        requests = tuple(
            GenerateRequest(
                request_id=RequestId(f"{parent}-{choice}"),
                prompt_token_ids=token_ids,
                sampling=sampling if choice == 0 else msgspec.structs.replace(sampling, choice=choice),
                parent=parent,
                namespace=cache_namespace(cache_salt),
                pin=cache_pin and choice == 0,
                tenant=tenant,
                priority=priority,
                arrival_s=arrival_s,
                waiting_timeout_s=timeouts.waiting_timeout,
                prefill_timeout_s=timeouts.prefill_timeout,
                decode_timeout_s=timeouts.decode_timeout,
            )
            for choice in range(params.n)
        )
        return Prepared(requests, text, token_ids, params, grammar, reading)

    def _check_pin(self, num_tokens: int) -> None:
        most = self.model.max_pinned_tokens
        if most == 0:
            raise InvalidRequestError(
                "cache_pin: this server pins nothing; start it with --max-pinned-tokens", param="cache_pin"
            )
        if num_tokens > most:
            raise InvalidRequestError(
                f"cache_pin: the prompt has {num_tokens} tokens, more than may be pinned in all (--max-pinned-tokens {most})",
                param="cache_pin",
            )

    def _sampling(self, params: SamplingParams, num_prompt_tokens: int) -> TokenSampling:
        model = self.model
        max_tokens = self._max_tokens(params, num_prompt_tokens)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) exceeds the {max_tokens} tokens that can be generated",
                param="min_tokens",
            )
        for field in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(field, getattr(params, field))
        bias = params.logit_bias or {}
        self.check_token_ids("logit_bias", tuple(bias))
        allowed = params.allowed_token_ids
        if allowed is not None and len(allowed) > model.vocab_size:
            raise InvalidRequestError(
                f"allowed_token_ids may hold at most {model.vocab_size} ids", param="allowed_token_ids"
            )
        return TokenSampling(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            temperature=float(params.temperature),
            # top_p 0 keeps the most likely token, which top_k says without a threshold.
            top_k=1 if params.top_p == 0 else 0 if not 0 < params.top_k < model.vocab_size else params.top_k,
            top_p=1.0 if params.top_p == 0 else float(params.top_p),
            min_p=float(params.min_p),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            eos_token_ids=model.eos_token_ids,
            stop_token_ids=tuple(
                dict.fromkeys(self.check_token_ids("stop_token_ids", tuple(params.stop_token_ids or ())))
            ),
            ignore_eos=params.ignore_eos,
            logit_bias=tuple(sorted((token, float(value)) for token, value in bias.items())),
            allowed_token_ids=None
            if allowed is None
            else tuple(sorted(set(self.check_token_ids("allowed_token_ids", tuple(allowed))))),
            bad_words=self._bad_words(params.bad_words or ()),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        room = self._limit - num_prompt_tokens
        if room < 1 or (params.max_tokens or 0) > room:
            raise self._too_long(num_prompt_tokens, params.max_tokens)
        return room if params.max_tokens is None else params.max_tokens

    @property
    def _limit(self) -> int:
        """Most tokens of prompt and answer together."""
        most = self.model.max_request_tokens
        return self.model.max_model_len if most is None else min(self.model.max_model_len, most)

    def _too_long(self, num_prompt_tokens: int, max_tokens: int | None) -> ContextLengthError:
        limit = self._limit
        what = "the context is" if limit == self.model.max_model_len else "the KV cache (--kv-cache-memory) holds"
        if num_prompt_tokens >= limit:
            return ContextLengthError(
                f"{what} {limit} tokens, but the prompt alone has {num_prompt_tokens}"
                + (" and leaves no room for an answer" if num_prompt_tokens == limit else "")
                + ": shorten the prompt",
                param="prompt",
            )
        asked = max_tokens or 0
        return ContextLengthError(
            f"{what} {limit} tokens, but the prompt has {num_prompt_tokens} and max_tokens asks for {asked} more "
            f"({num_prompt_tokens + asked} in all): shorten the prompt or lower max_tokens to {limit - num_prompt_tokens}",
            param="max_tokens",
        )

    def _check_logprobs(self, field: str, count: int | None) -> None:
        most = self.model.max_logprobs
        if count is None or most == -1:
            return
        if count > most or (count == -1 and most < self.model.vocab_size):
            asked = "the whole vocabulary" if count == -1 else f"{count}"
            raise InvalidRequestError(
                f"{field} asks for {asked}, but this server gives at most {most} (--max-logprobs)", param=field
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word at the start of a text and after a space, as the tokenizer spells it: other spellings stay
        possible.
        """
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}") if bare else (word,):
                token_ids = tuple(self.model.tokenizer.encode(text, add_special_tokens=False))
                if token_ids:
                    spellings[token_ids] = None
        return tuple(spellings)


def _count_characters(message: Any) -> int:
    """Characters of a message's content; what is no message counts nothing here and is refused later, by name."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return sum(len(text) for text in texts if isinstance(text, str))
