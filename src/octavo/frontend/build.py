"""Composes an engine: checkpoint -> weights, tokenizer, memory budget -> executor, scheduler, loop, in a thread or a
child process.

The only place that knows all the parts. It decides how much memory the KV cache gets and how long the context is;
everything else it passes on. Knows no HTTP and no event loop.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import Config, ModelConfig, SchedulerConfig, ServerConfig
from octavo.contracts import DiskSpace, Executor, Inbox, KVGroup, KVLayout, Outbox
from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.frontend.link import ChildLink, EngineLink, Hooks, Progress, ThreadLink
from octavo.frontend.model import ServedModel
from octavo.frontend.params import SamplingParams
from octavo.frontend.wire import Configure, EngineFacts

if TYPE_CHECKING:
    from octavo.engine import Scheduler
    from octavo.grammar.matchers import MatcherPool
    from octavo.grammar.tokens import Spell, TokenTable
    from octavo.loaders.checkpoint import Checkpoint
    from octavo.text.template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer

_log = logging.getLogger("octavo")

DEFAULT_KV_BYTES = 1 << 30
"""The KV cache's budget when nothing is configured, or a quarter of the free memory where that is less."""
_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DEFAULT_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Front:
    """What stays beside the clients: everything about text."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    chat_template_error: str | None
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Back:
    """What goes into the engine's thread or process. `run` takes over the executor; `close` is for when it never ran."""

    facts: EngineFacts
    scheduler: Scheduler
    executor: Executor
    grammar: MatcherPool | None = None
    jumps: bool = True

    def run(self, inbox: Inbox, outbox: Outbox) -> None:
        """Runs the engine loop until it is told to shut down."""
        from octavo.engine import EngineLoop

        try:
            EngineLoop(self.scheduler, self.executor, inbox, outbox, grammar=self.grammar, jumps=self.jumps).run()
        finally:
            if self.grammar is not None:
                self.grammar.stop()

    def close(self) -> None:
        """Frees weights and cache. Idempotent."""
        self.executor.close()


def open_engine(config: Config, hooks: Hooks, progress: Progress | None = None) -> tuple[EngineLink, ServedModel]:
    """Loads the configured model and starts its engine loop. Blocks until it is ready for requests.

    Weights load in this thread (or in the child) while the tokenizer loads in another.
    Raises ConfigError, ModelUnavailableError, ModelFileError, UnsupportedModelError.
    """
    from octavo.engine import check_scheduling
    from octavo.loaders.checkpoint import open_checkpoint

    check_scheduling(config.scheduler)
    if config.model.max_logprobs < -1:
        raise ConfigError("--max-logprobs must be 0 or more, or -1 for no bound", param="max_logprobs")
    checkpoint = open_checkpoint(config.model.model, revision=config.model.revision, check_config=_check_family)
    with ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer") as pool:
        loading = pool.submit(load_front, checkpoint, config)
        link: EngineLink
        if config.backend.engine_process:
            child = ChildLink(Configure(_for_child(config, checkpoint)), hooks)
            link, facts = child, child.wait_loaded(progress)
        else:
            back = load_back(checkpoint, config, progress, lambda: loading.result().tokenizer)
            link, facts = ThreadLink(back.run, hooks), back.facts
        try:
            front = loading.result()
        except BaseException:
            link.close()
            raise
    for warning in facts.warnings:
        _log.warning("%s", warning)
    return link, served_model(config, front, facts)


def open_with_executor(
    config: Config, model: ServedModel, executor: Executor, hooks: Hooks, *, num_blocks: int | None = None
) -> tuple[EngineLink, ServedModel]:
    """An engine loop in a thread over a given executor. `num_blocks` bounds its KV pool; default: all slots at full
    length.
    """
    from octavo.engine import Scheduler, check_scheduling

    check_scheduling(config.scheduler)
    scheduling = resolve_scheduler(config.scheduler, model.max_model_len)
    block_size = config.cache.block_size
    per_request = -(-model.max_model_len // block_size)
    layout = KVLayout(
        block_size=block_size,
        groups=(KVGroup(layers=(0,)),),
        num_blocks=(num_blocks or per_request * scheduling.max_num_seqs,),
    )
    scheduler = Scheduler(
        layout,
        scheduling,
        max_model_len=model.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_pinned_tokens=config.cache.max_pinned_tokens,
    )
    facts = EngineFacts(
        max_model_len=model.max_model_len, vocab_rows=model.vocab_size, max_request_tokens=scheduler.max_request_tokens
    )
    model = replace(
        model,
        max_request_tokens=scheduler.max_request_tokens,
        max_pinned_tokens=config.cache.max_pinned_tokens,
    )
    return ThreadLink(Back(facts, scheduler, executor).run, hooks), model


def load_front(checkpoint: Checkpoint, config: Config) -> Front:
    """Tokenizer, chat template and default sampling of a checkpoint.

    A model without a usable template still serves completions, with a warning. Raises ModelFileError,
    UnsupportedModelError, and ConfigError for a template file of the user's own that cannot be used.
    """
    tokenizer = load_tokenizer(checkpoint)
    template, problem = _load_template(checkpoint, config.model, tokenizer)
    return Front(
        name=checkpoint.name,
        tokenizer=tokenizer,
        chat_template=template,
        chat_template_error=problem,
        eos_token_ids=tokenizer.eos_token_ids,
        default_sampling=_default_sampling(checkpoint) if config.model.generation_config == "auto" else {},
    )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises ModelFileError, UnsupportedModelError."""
    from octavo.loaders.catalogue import cache_folder
    from octavo.text.tokenizer import Tokenizer

    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.metadata, cache=cache_folder().parent / "tokenizers")
    if checkpoint.tokenizer_json is None:
        raise ModelFileError(f"{checkpoint.name} has no tokenizer.json: octavo needs one beside the weights")
    return Tokenizer.from_hf(
        checkpoint.tokenizer_json,
        checkpoint.tokenizer_config,
        checkpoint.generation_config,
        checkpoint.metadata,
    )


def _load_template(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer
) -> tuple[ChatTemplate | None, str | None]:
    """The template, or why there is none. Raises ConfigError for what the user has configured."""
    from octavo.text.template import ChatTemplate

    named = {name: checkpoint.tokenizer_config.get(name) for name in ("unk_token", "pad_token")}
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in named.items()}
    specials = {name: text for name, text in texts.items() if isinstance(text, str)}
    source, own = checkpoint.chat_template, config.chat_template
    if own is not None:
        source, own = _own_template(own)
    defaults = _default_kwargs(config.default_chat_template_kwargs)
    if source is None:
        problem = "this model has no chat template: use completions, or start the server with --chat-template FILE"
    else:
        try:
            template = ChatTemplate(
                source,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                special_tokens=specials,
                default_kwargs=defaults,
            )
            return template, None
        except InvalidRequestError as error:
            raise ConfigError(
                f"--default-chat-template-kwargs: {error.message}", param="default_chat_template_kwargs"
            ) from None
        except ModelFileError as error:
            if own is not None:
                raise ConfigError(f"--chat-template {own}: {error.message}", param="chat_template") from None
            problem = f"this model's chat template cannot be used: {error.message}"
    _log.warning("%s: chat is refused, completions work", problem)
    return None, problem


def _own_template(given: str) -> tuple[str, str]:
    """A template that is given as a file or, as vLLM allows, as itself; and what to call it. Raises ConfigError."""
    if "{{" in given or "{%" in given:
        return given, "(given as text)"
    try:
        return Path(given).read_text(encoding="utf-8"), given
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given} cannot be read: {error}", param="chat_template") from None


def _default_kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"--default-chat-template-kwargs is no JSON object: {error}", param="default_chat_template_kwargs"
        ) from None


def _default_sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's own preferences, under vLLM's rule: what generation_config.json says, if it is a possible value."""
    values: dict[str, Any] = {}
    for name in _DEFAULT_SAMPLING_FIELDS:
        value = checkpoint.generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            _log.warning("generation_config.json is not followed in one point: %s", error.message)
        else:
            values[name] = value
    return values


def load_back(
    checkpoint: Checkpoint,
    config: Config,
    progress: Progress | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> Back:
    """Weights, KV cache, scheduler and matchers. `tokenizer` gives the one that is loaded elsewhere; default: it is loaded when needed.

    Raises ConfigError when memory or context length cannot be as configured.
    """
    from octavo.backends import make_backend
    from octavo.engine import Scheduler
    from octavo.loaders.catalogue import cache_folder
    from octavo.obs.machine import free_memory_bytes
    from octavo.runner.kv_files import OVERHEAD_BYTES, KVFiles
    from octavo.runner.load import content_digest, load_model, read_spec
    from octavo.runner.model_runner import ModelRunner

    if config.cache.kv_offloading_folder is not None and config.cache.kv_offloading_size == 0:
        raise ConfigError("--kv-offloading-folder needs --kv-offloading-size", param="kv_offloading_folder")
    spec = read_spec(checkpoint)
    asked = config.model.max_model_len
    if asked is not None and not 1 <= asked <= spec.max_context:
        raise ConfigError(
            f"--max-model-len is {asked}, but this model's context is 1 to {spec.max_context} tokens",
            param="max_model_len",
        )
    free_bytes = free_memory_bytes()
    loaded = load_model(
        checkpoint,
        make_backend(config.backend),
        dtype=config.model.dtype,
        kv_dtype=config.cache.kv_cache_dtype,
        progress=progress,
    )
    files: KVFiles | None = None
    try:
        budget = budget_memory(
            config,
            spec.kv_groups(loaded.model.bytes_per_kv_value, loaded.model.bytes_per_kv_scale),
            spec.max_context,
            free_bytes,
            loaded.model.weight_bytes,
        )
        scheduling = resolve_scheduler(config.scheduler, budget.max_model_len)
        namespace = _namespace(checkpoint.digest, loaded.model.arithmetic, budget.layout)
        disk_bytes = int(config.cache.kv_offloading_size * (1 << 30))
        if disk_bytes:
            # Files outlive this process: only what the weights hold, not when they were written, may tell them apart.
            namespace = _namespace(content_digest(checkpoint, spec), loaded.model.arithmetic, budget.layout)
            folder = config.cache.kv_offloading_folder
            files = KVFiles(Path(folder).expanduser() if folder else cache_folder().parent / "kv", namespace)
        scheduler = Scheduler(
            budget.layout,
            scheduling,
            max_model_len=budget.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            max_pinned_tokens=config.cache.max_pinned_tokens,
            swap_bytes=int(config.cache.swap_space * (1 << 30)),
            disk=None
            if files is None
            else DiskSpace(max_bytes=disk_bytes, overhead_bytes=OVERHEAD_BYTES, files=files.scan()),
            least_part=loaded.model.least_part,
            namespace=namespace,
        )
        executor = ModelRunner(
            loaded.model,
            budget.layout,
            max_num_seqs=scheduling.max_num_seqs,
            max_model_len=budget.max_model_len,
            kv_files=files,
        )
    except BaseException:
        loaded.model.close()
        if files is not None:
            files.close()
        raise
    facts = EngineFacts(
        max_model_len=budget.max_model_len,
        vocab_rows=spec.vocab_size,
        max_request_tokens=scheduler.max_request_tokens,
        warnings=budget.warnings,
    )
    matchers = _matchers(tokenizer or (lambda: load_tokenizer(checkpoint)), config)
    return Back(facts, scheduler, executor, matchers, config.structured.enable_jump_forward)


def _matchers(tokenizer: Callable[[], Tokenizer], config: Config) -> MatcherPool:
    from octavo.frontend.constrain import grammar_vocabulary
    from octavo.grammar.matchers import MatcherPool
    from octavo.obs.machine import cpu_count

    def load() -> tuple[TokenTable, Spell]:
        loaded = tokenizer()
        return grammar_vocabulary(loaded, loaded.eos_token_ids)

    return MatcherPool(load, num_threads=config.backend.threads or cpu_count())


def served_model(config: Config, front: Front, facts: EngineFacts) -> ServedModel:
    """What both halves know, as clients see it."""
    return ServedModel(
        names=tuple(dict.fromkeys(config.model.served_model_name)) or (front.name,),
        tokenizer=front.tokenizer,
        chat_template=front.chat_template,
        chat_template_error=front.chat_template_error,
        max_model_len=facts.max_model_len,
        vocab_size=min(front.tokenizer.vocab_size, facts.vocab_rows),
        eos_token_ids=front.eos_token_ids,
        default_sampling=front.default_sampling,
        created=int(time.time()),
        max_logprobs=config.model.max_logprobs,
        max_request_tokens=facts.max_request_tokens,
        max_pinned_tokens=config.cache.max_pinned_tokens,
        call_format=config.structured.tool_call_parser or _call_format(front.chat_template),
        reasoning_format=config.structured.reasoning_parser,
        constrains_auto_calls=config.structured.enable_auto_tool_choice,
    )


def _call_format(template: ChatTemplate | None) -> str | None:
    """The format of a template's calls. One that does not know tools gets them in the generic way."""
    from octavo.text.calls import infer_format
    from octavo.text.generic_tools import GENERIC_FORMAT

    if template is None:
        return None
    return infer_format(template.source) if template.mentions("tools") else GENERIC_FORMAT


# --- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """The KV cache's pools and the context they allow."""

    layout: KVLayout
    max_model_len: int
    warnings: tuple[str, ...] = ()


def budget_memory(
    config: Config, groups: tuple[KVGroup, ...], max_context: int, free_bytes: int, weight_bytes: int
) -> Budget:
    """Sizes the KV cache. `free_bytes` is what was free before the weights of `weight_bytes` were loaded.

    `--kv-cache-memory` is taken as it is, else `--gpu-memory-utilization` times the free memory, less the weights;
    else a modest default. One request of the full context must fit: the model's own context is reduced to what fits,
    with a warning, an explicit --max-model-len is refused. Raises ConfigError.
    """
    from octavo.engine import token_budget
    from octavo.runner.kv_budget import kv_layout, longest_context, request_bytes

    block_size = config.cache.block_size
    left_bytes = max(free_bytes - weight_bytes, 0)
    memory_bytes, source = _kv_bytes(config, free_bytes, weight_bytes)
    asked = config.model.max_model_len
    longest = asked or max_context
    max_chunk = token_budget(config.scheduler, longest)
    # Pinned prefixes may take so much of it for good.
    pinned_bytes = sum(group.bytes_per_token for group in groups) * config.cache.max_pinned_tokens
    fits = longest_context(
        groups, max(0, memory_bytes - pinned_bytes), longest, block_size=block_size, max_chunk=max_chunk
    )
    needs = request_bytes(groups, longest, block_size=block_size, max_chunk=max_chunk) + pinned_bytes
    warnings: list[str] = []
    if fits < longest:
        beside = " beside what may be pinned" if pinned_bytes else ""
        what = f"a context of {longest} tokens{beside} needs {_text(needs)} of KV cache, but {source} gives {_text(memory_bytes)}"
        if asked is not None or fits < block_size:
            remedy = f"lower --max-model-len to {fits} or " if fits >= block_size else ""
            raise ConfigError(f"{what}: {remedy}give it more with --kv-cache-memory", param="max_model_len")
        warnings.append(
            f"{what}: the context is reduced to {fits} tokens; --kv-cache-memory {needs} would allow all of it"
        )
    layout = kv_layout(
        groups,
        memory_bytes,
        max_model_len=min(fits, longest),
        block_size=block_size,
        max_chunk=max_chunk,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_pinned_tokens=config.cache.max_pinned_tokens,
    )
    if memory_bytes > left_bytes:
        raise ConfigError(
            f"{source} gives the KV cache {_text(memory_bytes)}, but only {_text(left_bytes)} are free beside the weights",
            param="kv_cache_memory",
        )
    return Budget(layout, min(fits, longest), tuple(warnings))


def resolve_scheduler(config: SchedulerConfig, max_model_len: int) -> SchedulerConfig:
    """The scheduler's section, checked, with the default of max_num_batched_tokens filled in. Raises ConfigError."""
    from octavo.engine import token_budget

    return msgspec.structs.replace(config, max_num_batched_tokens=token_budget(config, max_model_len))


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of "1073741824", "512M", "1.5G", "2GiB". Suffixes are powers of 1024. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"--{flag} is {text!r:.40}: give bytes, or a number with K, M, G or T", param=flag)
    return (
        int(float(match[1]) * _SUFFIXES[match[2].upper()])
        if "." in match[1]
        else int(match[1]) * _SUFFIXES[match[2].upper()]
    )


def _kv_bytes(config: Config, free_bytes: int, weight_bytes: int) -> tuple[int, str]:
    """The KV cache's budget, and what decided it."""
    cache = config.cache
    if cache.kv_cache_memory is not None:
        return parse_bytes(cache.kv_cache_memory, "kv-cache-memory"), f"--kv-cache-memory {cache.kv_cache_memory}"
    if cache.gpu_memory_utilization is not None:
        share = cache.gpu_memory_utilization
        if not 0.0 < share <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is {share:g}: give a share above 0 and up to 1",
                param="gpu_memory_utilization",
            )
        return max(int(share * free_bytes) - weight_bytes, 0), (
            f"--gpu-memory-utilization {share:g} of {_text(free_bytes)} free, less {_text(weight_bytes)} of weights,"
        )
    return min(DEFAULT_KV_BYTES, max(free_bytes - weight_bytes, 0) // 4), "the default budget"


def _for_child(config: Config, checkpoint: Checkpoint) -> Config:
    """The configuration a child gets: the files as found here, and nothing of the server."""
    model = msgspec.structs.replace(config.model, model=str(checkpoint.path), revision=None)
    return msgspec.structs.replace(config, model=model, server=ServerConfig())


def _check_family(hf_config: Mapping[str, Any]) -> None:
    """Refuses a repository's model by its config.json, before its weights are fetched."""
    from octavo.models import find_family

    architectures = hf_config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        find_family("hf", architectures[0]).from_hf(hf_config)


def _namespace(weights: bytes, arithmetic: str, layout: KVLayout) -> bytes:
    """What decides the bytes of KV content besides the tokens."""
    return hashlib.sha256(f"{weights.hex()}|{arithmetic}|{layout.block_size}|{layout.groups}".encode()).digest()


def _text(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
