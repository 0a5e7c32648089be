"""What happened since the last output: events and counts, taken out all at once.

This module does not know what the numbers mean or who reads them.
"""

from __future__ import annotations

from octavo.contracts import CacheStats, EngineOutput, ForwardWork, RequestTimes, StepStats, TokenEvent


class Tally:
    """Collects events and counts until `take` makes an output of them. Every fact is in exactly one output."""

    def __init__(self) -> None:
        self.firsts: list[TokenEvent] = []
        """First tokens, told before all else: delivering a large step takes time, and who waits for a beginning notices it most."""
        self.events: list[TokenEvent] = []
        self.finished: list[RequestTimes] = []
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_prefill_rows = 0
        self.num_prefill_tokens = 0
        self.num_decode_rows = 0
        self.num_preemptions = 0
        self.num_displaced = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def take(
        self,
        *,
        step: int,
        num_running: int,
        num_waiting: int,
        num_deferred: int,
        kv_usage: float,
        cache: CacheStats,
        step_s: float,
        work: ForwardWork | None,
    ) -> EngineOutput:
        """An output of everything collected, with the engine's present state. Empties the tally."""
        output = EngineOutput(
            events=(*self.firsts, *self.events),
            stats=StepStats(
                step=step,
                num_running=num_running,
                num_waiting=num_waiting,
                num_deferred=num_deferred,
                kv_usage=kv_usage,
                cache=cache,
                num_prompt_tokens=self.num_prompt_tokens,
                num_generated_tokens=self.num_generated_tokens,
                num_prefill_rows=self.num_prefill_rows,
                num_prefill_tokens=self.num_prefill_tokens,
                num_decode_rows=self.num_decode_rows,
                num_preemptions=self.num_preemptions,
                num_displaced=self.num_displaced,
                prefix_cache_queries=self.prefix_cache_queries,
                prefix_cache_hits=self.prefix_cache_hits,
                step_s=step_s,
                work=work,
                ttft_s=tuple(self.ttft_s),
                itl_s=tuple(self.itl_s),
                finished=tuple(self.finished),
            ),
        )
        self.__init__()  # type: ignore[misc]  # starts over
        return output
