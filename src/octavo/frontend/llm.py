"""`LLM`: the model in this program, without a server. vLLM's names, results in input order.

Runs the same engine loop as the server, in a thread or a child process; the calling thread turns tokens into text and
blocks until all is done. No event loop is needed. Calls from several threads run one after the other.
"""

from __future__ import annotations

import difflib
import math
import queue
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import BackendConfig, CacheConfig, Config, ModelConfig, SchedulerConfig, StructuredConfig
from octavo.contracts import Add, Cancel, EngineOutput, RequestId, RequestTimes, ResetPrefixCache
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, OctavoError
from octavo.frontend.beams import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from octavo.frontend.constrain import GrammarDoor, constrained
from octavo.frontend.link import WATCH_INTERVAL_S, EngineLink, Hooks, Watch
from octavo.frontend.outputs import CompletionOutput, Delta, Logprob, LogprobEntry, RequestOutput
from octavo.frontend.params import SamplingParams, check_integer
from octavo.frontend.requests import Prepared, RequestBuilder
from octavo.frontend.stream import StreamTable, merge
from octavo.frontend.tools import Reading, parse_tools

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "backend": BackendConfig,
    "structured": StructuredConfig,
}
_ALIASES = {"kv_cache_memory_bytes": "kv_cache_memory"}
_NOT_OFFLINE = frozenset({"served_model_name", "max_num_queued_reqs", "tenant_weights", "engine_restart"})

STEPS_AT_ONCE = 8
"""The default of num_scheduler_steps: results are wanted when all is done, not token by token."""

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the mappings may also hold "cache_salt"."""
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model.

    model: catalogue name, .gguf file, Hugging Face folder or repository id. seed: makes requests without a seed of
    their own repeatable, in the order in which they are given. All other keywords are the server's options with
    underscores (dtype, revision, chat_template, max_model_len, max_logprobs, generation_config, block_size, kv_cache_dtype,
    kv_cache_memory, gpu_memory_utilization, enable_prefix_caching, max_num_seqs, max_num_batched_tokens,
    enable_chunked_prefill, long_prefill_token_threshold, max_long_partial_prefills, scheduling_policy, priority_ageing,
    waiting_timeout, prefill_timeout, decode_timeout, num_scheduler_steps, backend, threads, engine_process, grammar_timeout).

    Raises ConfigError for an unknown keyword or a wrong value, and what loading raises.
    """

    def __init__(self, model: str = "smollm2-135m", *, seed: int | None = None, **options: Any) -> None:
        from octavo.frontend.build import open_engine

        config = _config(model, options)
        self._random = None if seed is None else random.Random(seed)
        self._incoming: queue.SimpleQueue[EngineOutput | str] = queue.SimpleQueue()
        self._streams = StreamTable()
        self._num_outputs = 0
        self._dead = ""
        self._running = threading.Lock()
        hooks = Hooks(on_output=self._incoming.put, on_death=self._incoming.put)
        self._link, self._model = open_engine(config, hooks)
        priorities = config.scheduler.scheduling_policy == "priority"
        self._builder = RequestBuilder(self._model, priorities=priorities)
        self._door = GrammarDoor(self._model, config.structured)
        # Also at interpreter exit: a loop in native code must end before the interpreter does.
        self._finalizer = weakref.finalize(self, _close, self._link, self._door)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or many; results come in the order of the prompts.

        sampling_params: one for all, one per prompt, or None for `get_default_sampling_params()`. priority: one number per
        prompt, lower ones run first; needs scheduling_policy="priority". Every prompt is checked before any is run.
        Raises InvalidRequestError and its kin, EngineError when the engine failed.
        """
        given: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = self._per_prompt(sampling_params, len(given))
        if priority is not None and (
            not isinstance(priority, Sequence)
            or len(priority) != len(given)
            or not all(isinstance(level, int) for level in priority)
        ):
            raise InvalidRequestError(
                f"priority must be a list with one whole number per prompt, here {len(given)}", param="priority"
            )
        return self._run(
            [
                self._prepare(prompt, self._seeded(one), level)
                for prompt, one, level in zip(given, params, priority or [0] * len(given), strict=True)
            ],
            use_tqdm,
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or many, through the model's chat template. Else like
        `generate`.

        tools: told to the model, in OpenAI's form. Calls stand in the text as the model writes them.
        """
        told = Reading(tools=parse_tools(tools, None, None))
        conversations: list[Any] = [messages] if _is_one_conversation(messages) else list(messages)
        params = self._per_prompt(sampling_params, len(conversations))
        return self._run(
            [
                self._builder.build_chat(
                    conversation,
                    self._seeded(one),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                    reading=told,
                )
                for conversation, one in zip(conversations, params, strict=True)
            ],
            use_tqdm,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of one prompt or many, in the order of the prompts.

        concurrency_limit: prompts searched at the same time, None for all. Every prompt is checked before any is run. Raises as
        `generate`, and InvalidRequestError where max_logprobs is less than twice the beams.
        """
        if concurrency_limit is not None:
            check_integer("concurrency_limit", concurrency_limit, 1, 2**31 - 1)
        given: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        whole = SamplingParams(max_tokens=params.max_tokens, temperature=0.0, logprobs=2 * params.beam_width)
        prepared = [self._prepare(prompt, whole, 0) for prompt in given]
        salts = [prompt.get("cache_salt") if isinstance(prompt, Mapping) else None for prompt in given]
        searches = [BeamSearch(one.prompt_token_ids, params, set(self._model.eos_token_ids)) for one in prepared]
        size = concurrency_limit or max(1, len(searches))
        bar = _bar(len(searches)) if use_tqdm else None
        try:
            for begin in range(0, len(searches), size):
                together = searches[begin : begin + size]
                self._search(together, salts[begin : begin + size], params)
                if bar is not None:
                    bar.update(len(together))
        finally:
            if bar is not None:
                bar.close()
        return [BeamSearchOutput([self._with_text(beam, params) for beam in search.best()]) for search in searches]

    def _search(self, searches: Sequence[BeamSearch], salts: Sequence[str | None], params: BeamSearchParams) -> None:
        step = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False)
        while live := [(search, salt) for search, salt in zip(searches, salts, strict=True) if search.live]:
            outputs = iter(
                self._run(
                    [
                        self._builder.build(beam.tokens, step, cache_salt=salt)
                        for search, salt in live
                        for beam in search.live
                    ],
                    use_tqdm=False,
                )
            )
            for search, _ in live:
                search.extend([(next(outputs).outputs[0].logprobs or [{}])[0] for _ in search.live])

    def _with_text(self, beam: BeamSearchSequence, params: BeamSearchParams) -> BeamSearchSequence:
        hidden = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        beam.text = self._model.tokenizer.decode(
            beam.tokens[:-1] if hidden else beam.tokens, skip_special_tokens=not params.include_stop_str_in_output
        )
        return beam

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when no parameters are given: the model's own preferences, else the defaults of
        SamplingParams.
        """
        return self._model.sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prompt beginnings. Always True, as nothing runs between calls."""
        self._check_alive()
        self._link.send(ResetPrefixCache())
        return True

    def close(self) -> None:
        """Ends the engine and frees its memory; a call that another thread has running ends with EngineDeadError. Idempotent."""
        self._dead = self._dead or "it was closed"
        self._finalizer()
        self._incoming.put(self._dead)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, params: SamplingParams, priority: int) -> Prepared:
        if not isinstance(prompt, Mapping):
            return self._builder.build(prompt, params, priority=priority)
        if unknown := set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise InvalidRequestError(
                f"a prompt has the unknown key {sorted(unknown)[0]!r}: known are prompt, prompt_token_ids and cache_salt",
                param="prompts",
            )
        content = prompt.get("prompt_token_ids")
        if content is None:
            content = prompt.get("prompt")
        if content is None:
            raise InvalidRequestError("a prompt needs the key prompt or prompt_token_ids", param="prompts")
        return self._builder.build(content, params, priority=priority, cache_salt=prompt.get("cache_salt"))

    def _per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequestError(
                "sampling_params must be a SamplingParams, or a list with one per prompt", param="sampling_params"
            )
        if len(params) != count:
            raise InvalidRequestError(
                f"{len(params)} sampling_params were given for {count} prompts: give one, or one per prompt",
                param="sampling_params",
            )
        return params

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._random is None or params.seed is not None:
            return params
        return msgspec.structs.replace(params, seed=self._random.getrandbits(64))

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDeadError(f"the engine is dead: {self._dead}")

    def _run(self, prepared: Sequence[Prepared], use_tqdm: bool) -> list[RequestOutput]:
        """Runs requests to their end. Whatever interrupts it, Ctrl-C included, cancels them."""
        with self._running:
            self._check_alive()
            return self._run_alone(prepared, use_tqdm)

    def _constrained(self, prepared: Sequence[Prepared]) -> list[Prepared]:
        """The requests with their grammars compiled, all of them at once."""
        futures = [self._door.begin(one) for one in prepared]
        return [
            one if future is None else constrained(one, future.result())
            for one, future in zip(prepared, futures, strict=True)
        ]

    def _run_alone(self, prepared: Sequence[Prepared], use_tqdm: bool) -> list[RequestOutput]:
        prepared = self._constrained(prepared)
        batch = _Batch(prepared, show=use_tqdm)
        try:
            for one, answer in zip(prepared, batch.answers, strict=True):
                self._streams.add(one, self._model, answer.put)
                self._link.send(Add(one.requests))
            watch = Watch()
            while batch.num_unfinished and batch.error is None:
                self._receive(watch, batch)
            if batch.error is not None:
                raise batch.error
            return [answer.output() for answer in batch.answers]
        except BaseException:
            request_ids = tuple(request.request_id for one in prepared for request in one.requests)
            self._streams.remove(request_ids)
            self._link.send(Cancel(request_ids))
            raise
        finally:
            batch.close()

    def _receive(self, watch: Watch, batch: _Batch) -> None:
        """Handles one output, or finds out that none will come."""
        try:
            # A child can stop without a word, which only waiting in rounds finds out; a thread cannot.
            received = self._incoming.get(timeout=None if self._link.signs_of_life is None else WATCH_INTERVAL_S)
        except queue.Empty:
            fault = watch.look(self._link, self._num_outputs, work_waits=True)
            if fault is None:
                return
            self._link.kill()
            received = fault
        if isinstance(received, str):
            self._dead = received
            self._streams.fail_all(EngineDeadError(f"the engine died: {received}"))
            return
        self._num_outputs += 1
        stats, cancels = self._streams.dispatch(received)
        batch.times.update((times.request_id, times) for times in stats.finished)
        if cancels:
            self._link.send(Cancel(cancels))


def _close(link: EngineLink, door: GrammarDoor) -> None:
    link.close()
    door.close()


class _Answer:
    """What came of one prompt so far."""

    def __init__(self, prepared: Prepared, batch: _Batch) -> None:
        self._prepared = prepared
        self._batch = batch
        self._deltas: list[list[Delta]] = [[] for _ in prepared.requests]
        self._num_unfinished = prepared.num_choices

    def put(self, delta: Delta) -> None:
        """Adds news of a choice."""
        self._deltas[delta.index].append(delta)
        self._batch.num_generated_tokens += len(delta.token_ids)
        if delta.error is not None:
            self._batch.error = delta.error
        if delta.finish_reason is not None:
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._batch.finished(len(self._prepared.prompt_token_ids))

    def output(self) -> RequestOutput:
        """The finished answer."""
        choices = [merge(deltas) for deltas in self._deltas]
        prompt_logprobs = choices[0].prompt_logprobs
        return RequestOutput(
            request_id=self._prepared.requests[0].parent,
            prompt=self._prepared.prompt,
            prompt_token_ids=list(self._prepared.prompt_token_ids),
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None if entry is None else _position(entry) for entry in prompt_logprobs],
            outputs=[_completion(choice) for choice in choices],
            finished=True,
            num_cached_tokens=min((choice.num_cached_tokens or 0 for choice in choices), default=0),
            metrics=self._batch.times.get(self._prepared.requests[0].request_id),
        )


class _Batch:
    """All prompts of a call, and the progress bar."""

    def __init__(self, prepared: Sequence[Prepared], *, show: bool) -> None:
        self.answers = [_Answer(one, self) for one in prepared]
        self.num_unfinished = len(self.answers)
        self.num_generated_tokens = 0
        self.times: dict[RequestId, RequestTimes] = {}
        self.error: OctavoError | None = None
        self._num_prompt_tokens = 0
        self._bar: Any = _bar(len(self.answers)) if show else None

    def finished(self, num_prompt_tokens: int) -> None:
        """Notes that one prompt has all its answers."""
        self.num_unfinished -= 1
        self._num_prompt_tokens += num_prompt_tokens
        if self._bar is not None:
            elapsed_s = max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.set_postfix_str(
                f"in {self._num_prompt_tokens / elapsed_s:.1f} tok/s, out {self.num_generated_tokens / elapsed_s:.1f} tok/s",
                refresh=False,
            )
            self._bar.update()

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


def _bar(num_prompts: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True)


def _completion(choice: Delta) -> CompletionOutput:
    logprobs = choice.logprobs
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        cumulative_logprob=None if logprobs is None else math.fsum(entry.logprob for entry in logprobs),
        logprobs=None if logprobs is None else [_position(entry) for entry in logprobs],
        finish_reason=None if choice.finish_reason is None else choice.finish_reason.value,
        stop_reason=choice.stop_reason,
    )


def _position(entry: LogprobEntry) -> dict[int, Logprob]:
    """A position in vLLM's shape: the token itself first, then the most likely ones."""
    position = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    for rank, top in enumerate(entry.top, start=1):
        position.setdefault(top.token_id, Logprob(top.logprob, rank, top.token))
    return position


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a text, a list of token ids, or a list of prompts, not {type(prompts).__name__}",
            param="prompts",
        )
    return len(prompts) > 0 and all(isinstance(item, int) for item in prompts)


def _is_one_conversation(messages: Any) -> bool:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a conversation (a list of messages) or a list of them, not {type(messages).__name__}",
            param="messages",
        )
    return len(messages) > 0 and isinstance(messages[0], Mapping)


def _config(model: str, options: Mapping[str, Any]) -> Config:
    """The configuration that keywords ask for. Raises ConfigError."""
    fields = {
        field: section
        for section, kind in _SECTIONS.items()
        for field in kind.__struct_fields__
        if field not in _NOT_OFFLINE and field != "model"
    }
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    values["model"]["model"] = str(model)
    for name, value in options.items():
        field = _ALIASES.get(name, name)
        if field not in fields:
            near = difflib.get_close_matches(name, [*fields, *_ALIASES, "seed"], 1)
            raise ConfigError(
                f"LLM has no option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""), param=name
            )
        values[fields[field]][field] = str(value) if field == "kv_cache_memory" and isinstance(value, int) else value
    sections: dict[str, Any] = {}
    for section, kind in _SECTIONS.items():
        try:
            sections[section] = msgspec.convert(values[section], kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"an option of LLM is wrong: {error}") from None
    config = Config(**sections)
    if config.scheduler.num_scheduler_steps is None:
        scheduler = msgspec.structs.replace(config.scheduler, num_scheduler_steps=STEPS_AT_ONCE)
        config = msgspec.structs.replace(config, scheduler=scheduler)
    return config
