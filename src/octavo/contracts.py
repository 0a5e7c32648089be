"""What crosses a border: values between frontend, engine and runner. Frozen, serializable with msgspec, without behaviour.

This module does not know text, HTTP, tensors or devices. Token ids, positions and block ids are plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, NewType, Protocol

import msgspec

RequestId = NewType("RequestId", str)
"""The server's own id of one sequence in the engine. Never chosen by a client."""
TokenId = NewType("TokenId", int)
BlockId = NewType("BlockId", int)
"""Index of a KV block within its group's pool. `NULL_BLOCK` marks a position whose block was freed (outside a window)."""
Slot = NewType("Slot", int)
"""Index of a running request in the runner's per-request arrays, 0..max_num_seqs-1."""

NULL_BLOCK = BlockId(-1)


class FinishReason(StrEnum):
    """Why a request ended. Values are those of OpenAI and vLLM."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one sequence in terms of token ids: what the engine and the sampler need, already validated.

    `temperature` 0 is greedy. `top_k` 0 keeps all. Penalties are vLLM's: presence and frequency count generated tokens, repetition
    counts prompt and generated tokens. `seed` and `choice` key the noise together with the position, so that it does not depend on
    what else runs. `stop_token_ids` holds the request's own ids and, unless end-of-sequence is ignored, `eos_token_ids` end it too.
    `logprobs` and `prompt_logprobs` are numbers of alternatives besides the token itself; None is off, -1 the whole vocabulary.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A request with n choices becomes n of these, with `choice` 0..n-1 and one `parent`.

    `grammar` is a source as `octavo.grammar` writes it: only what a `Grammar` allows is sampled, and where it ends the sequence does.
    `namespace` starts the block-hash chain of the prefix cache beside the model's own digest: cache salt, adapter. With
    `pin` the prompt's full blocks are kept in the prefix cache, if the budget for that allows.
    `tenant` is who shares with whom under the policy `fair`. `priority`: lower runs first. The timeouts, in seconds, count from arrival,
    from the first step that runs it and from its first token; None is no limit of the request's own.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: TokenSampling
    parent: str = ""
    grammar: str | None = None
    namespace: bytes = b""
    pin: bool = False
    tenant: str = "default"
    priority: int = 0
    arrival_s: float = 0.0
    waiting_timeout_s: float | None = None
    prefill_timeout_s: float | None = None
    decode_timeout_s: float | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the raw logits (before penalties and temperature).

    `token_ids[0]` is the token itself, followed by the most likely ones in descending order (ties: lower id first);
    `logprobs` is parallel to it. `rank` is the 1-based rank of the token itself. Values are finite or -inf.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did for one request: new tokens, and on the last event how it ended. Exactly one event is terminal.

    `stop_token` is the id from `stop_token_ids` that ended it (None for end-of-sequence). `prompt_logprobs` comes once,
    with the first event: one entry per prompt token, the first None. `num_cached_tokens` is set on the first event; so is
    `num_pinned_tokens` if the request asked for it, 0 when there was no room.
    With `finish_reason` ERROR, `error_code` and `error_message` say why.
    """

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int | None = None
    num_pinned_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error_code: str | None = None
    error_message: str | None = None


# --- KV cache layout ------------------------------------------------------------------------------------------------


class Retention(StrEnum):
    """How long the KV of a group's layers is needed."""

    FULL = "full"
    WINDOW = "window"


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV is kept by the same rule and therefore share block tables. Window in tokens, sizes in bytes.

    With WINDOW the token at position p attends to positions max(0, p - window + 1) .. p. The head counts say what one token
    stores per layer; the engine does not read them.
    """

    layers: tuple[int, ...]
    retention: Retention = Retention.FULL
    window: int | None = None
    bytes_per_token: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Pools of the KV cache: one per group, `num_blocks[g]` blocks of `block_size` tokens each."""

    block_size: int
    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]


class DiskFile(msgspec.Struct, frozen=True):
    """A file of KV content. `content` is None for one of another model, which can only be deleted, by its name."""

    name: str
    content: BlockContent | None
    num_bytes: int


class DiskSpace(msgspec.Struct, frozen=True, kw_only=True):
    """Room on disk for content of KV blocks: `max_bytes` in all, a file takes `overhead_bytes` besides its content. `files` are already
    there, least recently used first.
    """

    max_bytes: int
    overhead_bytes: int
    files: tuple[DiskFile, ...] = ()


# --- a step ---------------------------------------------------------------------------------------------------------


class SlotStart(msgspec.Struct, frozen=True, kw_only=True):
    """A request enters a slot, for the first time or again after preemption.

    `token_ids` are all known tokens: the prompt and what was generated before a preemption.
    """

    slot: Slot
    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: TokenSampling


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Compute positions start..start+count-1 of a slot's known tokens.

    `new_blocks[g]` are appended to the row's block table of group g, which is empty after a `SlotStart`; `NULL_BLOCK` among
    them stands for positions that a prefix hit need not have. With `kept_blocks` every table is first cut to so many entries: what
    follows them has been replaced by blocks that others computed, so `start` may be beyond the last computed token.
    `freed_blocks[g]` counts table entries, from the front of the table, that no longer may be read (outside the window): all of
    them, not only new ones; empty when no group has a window. `forced` tokens, which a grammar left no choice of, follow the one that
    the slot sampled last: the runner appends them to the slot's known tokens before anything else. With `sample`, the last position's
    logits give a new token, which the runner appends too.
    """

    slot: Slot
    start: int
    count: int
    new_blocks: tuple[tuple[int, ...], ...]
    kept_blocks: int | None = None
    freed_blocks: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    sample: bool = False


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy the content of block `source` of a group to block `target`."""

    group: int
    source: BlockId
    target: BlockId


class BlockContent(NamedTuple):
    """Names what a block of a group holds, wherever it is kept. Equal names mean equal bytes."""

    group: int
    key: bytes


class Medium(StrEnum):
    """Where content of blocks is kept outside of the KV cache."""

    MEMORY = "memory"
    DISK = "disk"


class BlockSave(msgspec.Struct, frozen=True):
    """Keep the content of `block`, under the name of its group and `key`."""

    group: int
    block: BlockId
    key: bytes
    medium: Medium


class BlockLoad(msgspec.Struct, frozen=True):
    """Put content that is in memory into `block`. It stays in memory."""

    group: int
    block: BlockId
    key: bytes


class BlockTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Content of KV blocks that a step moves, in this order: saves, then (after the plan's copies) loads, fetches, drops, deletes.

    `fetches` are read from disk into memory, which may take longer than the step. `drops` leave memory. `deletes` are files, of other
    models by name; one that is still to be written is written first. `patient` saves wait for a disk that is behind: nobody else does.
    """

    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    fetches: tuple[BlockContent, ...] = ()
    drops: tuple[BlockContent, ...] = ()
    deletes: tuple[BlockContent | str, ...] = ()
    patient: bool = False


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step, decided, or a part of one: plans with the same `step` are computed one after the other.

    The runner applies `releases`, then `starts`, then moves the blocks of `traffic` and `copies`, then computes `rows`. Without rows it
    waits a little for content on its way from disk.

    With `repeat` above 1 every row has a count of 1 and samples, and all are computed up to so many times, each time the token that was
    sampled before. It ends early after a step in which a row fails or samples one of its end or stop ids, or where the executor likes.

    After a step that raised, the next plan repeats its releases and releases the slots of its rows, and of those that were to follow:
    releasing a slot that is not bound does nothing.
    """

    step: int
    releases: tuple[Slot, ...]
    starts: tuple[SlotStart, ...]
    rows: tuple[RowPlan, ...]
    num_tokens: int
    repeat: int = 1
    copies: tuple[BlockCopy, ...] = ()
    traffic: BlockTraffic | None = None


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one row of the plan, in the plan's order.

    `token_ids` is empty when the row did not sample. The executor gives one token, or with `StepPlan.repeat` more, to all rows without an
    error as many; those that a grammar forces after a single one are added by the loop. `prompt_logprobs`, when the request asks for
    them, has one entry for each prompt position start+1..start+count that is still within the prompt. `error` ends this request alone,
    and what a repetition gave it before is dropped; with `invalid_request` the request itself is to blame for it.
    """

    slot: Slot
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    invalid_request: bool = False


class ForwardWork(msgspec.Struct, frozen=True):
    """What forwards took, and had to do at least: the lower bounds by which a machine's limits are compared with them.

    `weight_bytes` and `kv_bytes` are what must be read, each weight once and the visible K and V once per row; `ops` counts two for
    each product and sum of matrices and attention.
    """

    forward_s: float
    weight_bytes: int
    kv_bytes: int
    ops: int


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of blocks outside of the KV cache since the last report: `saved` to disk or not, `fetched` into memory, or `missing`
    because the file was damaged, foreign or gone. Times in seconds: of loads and saves those of the step, of fetches and writes those
    that passed beside it.
    """

    saved: tuple[BlockContent, ...] = ()
    unsaved: tuple[BlockContent, ...] = ()
    fetched: tuple[BlockContent, ...] = ()
    missing: tuple[BlockContent, ...] = ()
    load_bytes: int = 0
    load_s: float = 0.0
    fetch_bytes: int = 0
    fetch_s: float = 0.0
    write_bytes: int = 0
    write_s: float = 0.0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a step, one per row of its plan. `work` is None where the backend does not count it."""

    step: int
    rows: tuple[RowResult, ...]
    work: ForwardWork | None = None
    traffic: TrafficReport | None = None


class MaskBits(msgspec.Struct, frozen=True):
    """Which tokens may be sampled, row by row: `num_words` words of 32 bits each in `words`, token t is bit t % 32 of word t // 32.

    Tokens beyond the words are not allowed. A row whose mask could not be computed allows nothing; `failures` says why.
    """

    words: bytearray
    num_words: int
    failures: dict[int, str]


class StepMasks(Protocol):
    """The masks of a step, row i for `slots[i]`, being computed while its forward runs. Other slots may sample anything."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Slots that sample in this step and are bound to a grammar."""
        ...

    def wait(self) -> MaskBits:
        """Blocks until all are computed. May be called again."""
        ...


class StepHandle(Protocol):
    """A submitted step."""

    def sample(self, masks: StepMasks | None = None) -> StepResult:
        """Waits for the forward and the masks, samples, and returns the result. Called exactly once."""
        ...


class Executor(Protocol):
    """Runs plans in order. It owns device memory: KV cache, weights, per-slot arrays. It owns no request state."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a step. An exception here or in `sample` fails the requests of this step, never the loop."""
        ...

    def close(self) -> None:
        """Frees device memory and threads. Idempotent."""
        ...


class Grammar(Protocol):
    """Matchers of structured output, one per sequence that has a grammar. One thread calls it.

    A matcher stands at the start of the output; what it allows depends on its source and the tokens it was advanced by, on nothing else.
    """

    def prepare(self) -> None:
        """Does now what the first `open` would otherwise wait for. Idempotent."""
        ...

    def open(self, request_id: RequestId, source: str) -> None:
        """Begins to make a matcher, elsewhere than in this thread. `opened` tells when it is there."""
        ...

    def opened(self) -> Sequence[tuple[RequestId, str | None]]:
        """Those that came to an end since the last call: there (None), or why there is none."""
        ...

    def masks(self, rows: Sequence[tuple[Slot, RequestId]]) -> StepMasks:
        """Begins to compute what each may sample next."""
        ...

    def advance(self, request_id: RequestId, token: int, *, jump: bool) -> Sequence[int]:
        """Moves a matcher on by a sampled token, and with `jump` by the tokens that must follow it because no other may: it returns them.

        None of them ends the output.
        """
        ...

    def close(self, request_id: RequestId) -> None:
        """Forgets a matcher, also one that is being made. Idempotent."""
        ...


# --- the engine's mailbox -------------------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag="add"):
    """To the engine: start these sequences."""

    requests: tuple[GenerateRequest, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """To the engine: end these requests now, in whatever state. Unknown ids are ignored (they may just have finished)."""

    request_ids: tuple[RequestId, ...]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """To the engine: forget all cached blocks that no request holds, pinned ones and those outside of memory included."""


class UnpinPrefix(msgspec.Struct, frozen=True, tag="unpin_prefix"):
    """To the engine: stop keeping the blocks of a prompt, of all prompts with `token_ids` None. What is not pinned is ignored."""

    token_ids: tuple[int, ...] | None = None
    namespace: bytes = b""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """To the engine: abort what runs and end the loop."""


EngineInput = Add | Cancel | ResetPrefixCache | UnpinPrefix | Shutdown


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request's story for metrics and traces. Times in seconds of the engine's monotonic clock.

    `scheduled_s` and `first_token_s` are None when the request ended before that moment. `error_code` is set with `finish_reason` ERROR.
    """

    request_id: RequestId
    finish_reason: FinishReason
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    max_tokens: int
    tenant: str = "default"
    error_code: str | None = None


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the KV cache in a step. The first three are of prompts that start: tokens by where they were found.

    `waits`: requests that began to wait for blocks another one computes, or for disk. The sizes at the end are the present state.
    """

    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    disk_query_tokens: int = 0
    waits: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    saved_files: int = 0
    unsaved_files: int = 0
    fetched_files: int = 0
    missing_files: int = 0
    write_bytes: int = 0
    write_s: float = 0.0
    fetch_bytes: int = 0
    fetch_s: float = 0.0
    swap_bytes: int = 0
    disk_bytes: int = 0
    pinned_tokens: int = 0


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine after a step or a part of one (or while idle), and what happened in it. Counts are of this part, not totals.

    `kv_usage` is the used share (0..1) of the fullest group; cached but unreferenced blocks count as free. `work` is None outside of
    steps and where the backend does not count it. Of those waiting, `num_deferred` are held back for others' sake, the rest wait for
    slots, blocks or budget. Of the preemptions, `num_displaced` made room for a request that goes first by the policy, the rest were for
    want of blocks. A decode row computes one token of a request that has generated some, every other row is prefill.
    """

    step: int
    num_running: int
    num_waiting: int
    kv_usage: float
    num_deferred: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    num_preemptions: int = 0
    num_displaced: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    cache: CacheStats | None = None
    step_s: float = 0.0
    work: ForwardWork | None = None
    ttft_s: tuple[float, ...] = ()
    itl_s: tuple[float, ...] = ()
    finished: tuple[RequestTimes, ...] = ()


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """From the engine, once per step: all token events of the step and its statistics."""

    events: tuple[TokenEvent, ...]
    stats: StepStats


class Inbox(Protocol):
    """Messages to the engine, in order."""

    def receive(self, timeout_s: float | None) -> Sequence[EngineInput]:
        """All messages waiting now; blocks up to `timeout_s` (None: for ever, 0: not at all) while there is none."""
        ...


class Outbox(Protocol):
    """Messages from the engine."""

    def send(self, output: EngineOutput) -> None:
        """Delivers one step's output. Must not block on a slow consumer."""
        ...
