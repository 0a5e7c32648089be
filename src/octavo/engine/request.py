"""One sequence in the engine: two numbers, *known* and *computed* tokens, a status, and how it ends.

Known tokens are the prompt and what was sampled or forced; computed are those whose KV is written. All of the scheduler's work is to
compute some of the known-but-not-computed ones. This module does not know blocks' rules, other requests or steps.
"""

from __future__ import annotations

from enum import Enum, auto

from octavo.contracts import FinishReason, GenerateRequest, RequestId, RequestTimes, Slot, TokenEvent, TokenLogprobs
from octavo.engine.blocks import require
from octavo.engine.kv import SequenceBlocks

Order = tuple[float, int]
"""What comes first, and the number of the request, by which equals are told apart."""


class Status(Enum):
    """WAITING: never ran. RUNNING: holds a slot and blocks. PREEMPTED: ran, lost both, waits to run again. FINISHED: ended."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


_NEXT = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set(),
}


class Request:
    """State of one sequence. Owned and changed by the scheduler alone."""

    __slots__ = (
        "_eos",
        "_stop",
        "_token_limit",
        "blocks",
        "first_event_sent",
        "first_token_s",
        "in_flight",
        "is_long",
        "last_token_s",
        "num_cached_tokens",
        "num_charged",
        "num_computed",
        "num_pinned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_untold",
        "order",
        "prompt_logprobs",
        "scheduled_s",
        "slot",
        "spec",
        "status",
        "token_ids",
    )

    def __init__(self, spec: GenerateRequest, blocks: SequenceBlocks, max_model_len: int, order: Order) -> None:
        sampling = spec.sampling
        self.spec = spec
        self.order = order
        """Where it stands among others, for life; see `policy`."""
        self.is_long = False
        """Whether what is to be computed of it takes so much of a step that it may have to wait for others of the kind."""
        self.status = Status.WAITING
        self.token_ids = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_computed = 0
        self.blocks = blocks
        self.slot: Slot | None = None
        self.in_flight = False
        """A step that computes this request is submitted and not committed: its slot and blocks must stay."""
        self.num_cached_tokens: int | None = None
        self.num_pinned_tokens: int | None = None
        self.num_charged = 0
        """Positions that the policy counted as service: those computed for the first time, and those that a first hit brought."""
        self.num_preemptions = 0
        self.num_untold = 0
        """Tokens at the end that were forced after the last sampled one, and that the executor is still to be told."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if sampling.prompt_logprobs is None else [None]
        self.first_event_sent = False
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._token_limit = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        self._eos = frozenset() if sampling.ignore_eos else frozenset(sampling.eos_token_ids)
        self._stop = frozenset(sampling.stop_token_ids)

    @property
    def request_id(self) -> RequestId:
        """The engine-wide unique id."""
        return self.spec.request_id

    @property
    def num_known(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_known(self) -> int:
        """Most tokens the sequence can come to have: prompt plus `max_tokens`, within the model's length."""
        return self._token_limit

    @property
    def at_length_limit(self) -> bool:
        """Whether no further token may be sampled."""
        return len(self.token_ids) >= self._token_limit

    @property
    def max_hit_tokens(self) -> int:
        """Most tokens that may be taken from the prefix cache: logits are needed after the last known token, and, for prompt logprobs, at
        every prompt position not scored yet."""
        limit = self.num_known - 1
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens:
            limit = min(limit, len(self.prompt_logprobs) - 1)
        return limit

    def move(self, to: Status) -> None:
        """Changes the status. Raises InvariantError for a change that cannot be."""
        require(to in _NEXT[self.status], f"request {self.request_id} cannot go from {self.status.name} to {to.name}")
        self.status = to

    def append(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Adds a sampled or forced token. Returns why it ends the request, if it does, and the stop token id that ended it.

        End-of-sequence and stop ids count only after `min_tokens` tokens (the sampler does not choose them before). The token that ends a
        request is part of its output.
        """
        may_stop = self.num_generated >= self.spec.sampling.min_tokens
        self.token_ids.append(token)
        if may_stop and token in self._eos:
            return FinishReason.STOP, None
        if may_stop and token in self._stop:
            return FinishReason.STOP, token
        if self.at_length_limit:
            return FinishReason.LENGTH, None
        return None, None

    def collect_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Adds what a row starting at position `start` says about the prompt; what is known from before a preemption is skipped."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(logprobs[len(self.prompt_logprobs) - start - 1 :])

    def event(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        finish_reason: FinishReason | None = None,
        stop_token: int | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> TokenEvent:
        """The next event of this request; the first one carries the cached tokens and, if they are complete, the prompt logprobs."""
        num_cached_tokens = num_pinned_tokens = prompt_logprobs = None
        if not self.first_event_sent:
            self.first_event_sent = True
            num_cached_tokens, num_pinned_tokens = self.num_cached_tokens or 0, self.num_pinned_tokens
            if self.prompt_logprobs is not None and len(self.prompt_logprobs) == self.num_prompt_tokens:
                prompt_logprobs = tuple(self.prompt_logprobs)
        return TokenEvent(
            request_id=self.spec.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
            num_pinned_tokens=num_pinned_tokens,
            finish_reason=finish_reason,
            stop_token=stop_token,
            error_code=error_code,
            error_message=error_message,
        )

    def times(self, reason: FinishReason, now_s: float, error_code: str | None) -> RequestTimes:
        """The finished request's story."""
        return RequestTimes(
            request_id=self.spec.request_id,
            finish_reason=reason,
            arrival_s=self.spec.arrival_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=now_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_generated_tokens=self.num_generated,
            num_preemptions=self.num_preemptions,
            max_tokens=self.spec.sampling.max_tokens,
            tenant=self.spec.tenant,
            error_code=error_code,
        )
