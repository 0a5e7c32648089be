"""From `TokenEvent`s to `Delta`s: incremental text, stop strings, logprobs with their texts. Shared by server and
offline `LLM`.

Knows no HTTP, no event loop and no thread; one thread calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from octavo import errors
from octavo.contracts import (
    EngineOutput,
    FinishReason,
    GenerateRequest,
    RequestId,
    RequestTimes,
    StepStats,
    TokenEvent,
    TokenLogprobs,
)
from octavo.errors import EngineDeadError, EngineError, OctavoError
from octavo.frontend.model import ServedModel
from octavo.frontend.outputs import Delta, LogprobEntry, TopEntry
from octavo.frontend.params import SamplingParams
from octavo.frontend.requests import Prepared
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop import StopMatcher

_log = logging.getLogger("octavo")


class OutputStream:
    """The text of one choice, as it grows.

    The id that ended it (end-of-sequence or a stop token) is among the token ids, its text is not shown, except with
    include_stop_str_in_output. A stop string must lie within the text after the first `min_tokens` tokens; tokens
    after the one that completes it are dropped. `shown`: control tokens that are text nevertheless.
    """

    def __init__(
        self, request: GenerateRequest, params: SamplingParams, model: ServedModel, shown: Sequence[str] = ()
    ) -> None:
        self._request = request
        self._index = request.sampling.choice
        self._tokenizer = model.tokenizer
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._detokenizer = (
            Detokenizer(model.tokenizer, skip_special_tokens=params.skip_special_tokens, shown=shown)
            if params.detokenize
            else None
        )
        stops = params.stop_strings
        self._matcher = StopMatcher(stops, include=self._include_stop) if stops else None
        self.finished = False

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._request.tenant

    @property
    def stopped_by_text(self) -> bool:
        """Whether a stop string ended it."""
        return self._matcher is not None and self._matcher.stopped is not None

    def lost(self, now_s: float) -> RequestTimes:
        """The story of a sequence whose engine died before it could tell it."""
        request = self._request
        return RequestTimes(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            arrival_s=request.arrival_s,
            scheduled_s=None,
            first_token_s=None,
            finished_s=now_s,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=0,
            num_generated_tokens=self._num_tokens,
            num_preemptions=0,
            max_tokens=request.sampling.max_tokens,
            tenant=request.tenant,
            error_code=EngineDeadError.code,
        )

    def fail(self, error: OctavoError) -> Delta:
        """The terminal delta of a stream that ends with an error from outside."""
        self.finished = True
        return Delta(index=self._index, finish_reason=FinishReason.ERROR, error=error)

    def push(self, event: TokenEvent) -> Delta | None:
        """News from one event; None when it brings none yet. After the terminal delta nothing may be pushed."""
        if event.finish_reason is FinishReason.ERROR:
            return self.fail(_error(event))
        reason, stop_reason = event.finish_reason, event.stop_token
        token_ids, logprobs = event.token_ids, event.logprobs
        # The id that ended the sequence is its last one, and the event's.
        hides_last = reason is FinishReason.STOP and not self._include_stop
        text, num_taken = self._take(token_ids[:-1] if hides_last else token_ids)
        if not self.stopped_by_text:
            num_taken = len(token_ids)
            if reason is not None:
                text += self._flush()
        stopped: int | str | None = stop_reason
        if self._matcher is not None and self._matcher.stopped is not None:
            reason, stopped = FinishReason.STOP, self._matcher.stopped
        self._num_tokens += num_taken
        self.finished = reason is not None
        if not text and not num_taken and reason is None and event.num_cached_tokens is None:
            return None
        return Delta(
            index=self._index,
            text=text,
            token_ids=token_ids[:num_taken],
            logprobs=None if logprobs is None else tuple(self._entry(position) for position in logprobs[:num_taken]),
            prompt_logprobs=None
            if event.prompt_logprobs is None
            else tuple(None if position is None else self._entry(position) for position in event.prompt_logprobs),
            num_cached_tokens=event.num_cached_tokens,
            num_pinned_tokens=event.num_pinned_tokens,
            finish_reason=reason,
            stop_reason=stopped,
        )

    def _take(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """The text that tokens make final, and how many of them count: those up to the one that completes a stop
        string.
        """
        if self._detokenizer is None:
            return "", len(token_ids)
        if self._matcher is None:
            return self._detokenizer.push(token_ids), len(token_ids)
        texts: list[str] = []
        for number, token in enumerate(token_ids, start=1):
            active = self._num_tokens + number > self._min_tokens
            texts.append(self._matcher.push(self._detokenizer.push((token,)), active=active))
            if self._matcher.stopped is not None:
                return "".join(texts), number
        return "".join(texts), len(token_ids)

    def _flush(self) -> str:
        """What was held back, now that no token follows."""
        if self._detokenizer is None:
            return ""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        active = self._num_tokens >= self._min_tokens
        return self._matcher.push(rest, active=active) + self._matcher.flush()

    def _entry(self, position: TokenLogprobs) -> LogprobEntry:
        # A model may have logits for more ids than its tokenizer has tokens.
        known = self._tokenizer.pieces
        pieces = [known[token] if token < len(known) else b"" for token in position.token_ids]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        own, *top = map(TopEntry, position.token_ids, texts, pieces, position.logprobs)
        return LogprobEntry(own.token_id, own.token, own.bytes, own.logprob, position.rank, tuple(top))


class StreamTable:
    """The streams of all unfinished sequences, by request id. Each delta goes to the sink its request was added with."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, tuple[OutputStream, Callable[[Delta], None]]] = {}
        self._of_tenant: Counter[str] = Counter()
        self._stopped: set[RequestId] = set()
        """Ended here by a stop string; the engine is yet to report them, as aborted or as at their full length."""

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, prepared: Prepared, model: ServedModel, sink: Callable[[Delta], None]) -> None:
        """Adds all choices of a request."""
        shown = prepared.reading.markers
        for request in prepared.requests:
            self._streams[request.request_id] = (OutputStream(request, prepared.params, model, shown), sink)
            self._of_tenant[request.tenant] += 1

    def num_of(self, tenant: str) -> int:
        """Unfinished sequences of a tenant."""
        return self._of_tenant[tenant]

    def _forget(self, request_id: RequestId) -> None:
        entry = self._streams.pop(request_id, None)
        if entry is not None:
            self._of_tenant[entry[0].tenant] -= 1

    def remove(self, request_ids: Iterable[RequestId]) -> None:
        """Forgets sequences; their later events are ignored."""
        for request_id in request_ids:
            self._forget(request_id)

    def dispatch(self, output: EngineOutput) -> tuple[StepStats, tuple[RequestId, ...]]:
        """Feeds a step's events to their streams.

        Returns the step's statistics, in which a sequence that a stop string ended counts as stopped rather than
        aborted, and the sequences the engine must still be told to cancel.
        """
        cancels: list[RequestId] = []
        for event in output.events:
            entry = self._streams.get(event.request_id)
            if entry is None:
                continue
            stream, sink = entry
            try:
                delta = stream.push(event)
            except Exception as error:  # noqa: BLE001 - a bug of ours that one sequence brings to light must not end the others
                _log.error("an answer could not be turned into text", exc_info=error)
                delta = stream.fail(EngineError(f"the answer could not be turned into text ({type(error).__name__})"))
            if stream.finished:
                self._forget(event.request_id)
                if stream.stopped_by_text:
                    self._stopped.add(event.request_id)
                if event.finish_reason is None:
                    cancels.append(event.request_id)
            if delta is not None:
                sink(delta)
        return self._corrected(output.stats), tuple(cancels)

    def lost(self, now_s: float) -> tuple[RequestTimes, ...]:
        """What the dead engine can no longer report of its sequences, so that each is counted. `now_s` on the monotonic clock."""
        return tuple(stream.lost(now_s) for stream, _ in self._streams.values())

    def fail_all(self, error: OctavoError) -> tuple[RequestId, ...]:
        """Ends every stream with an error; returns which they were."""
        streams, self._streams = self._streams, {}
        self._of_tenant.clear()
        self._stopped.clear()
        for stream, sink in streams.values():
            sink(stream.fail(error))
        return tuple(streams)

    def _corrected(self, stats: StepStats) -> StepStats:
        if not self._stopped or not stats.finished:
            return stats
        return msgspec.structs.replace(stats, finished=tuple(self._reason(times) for times in stats.finished))

    def _reason(self, times: RequestTimes) -> RequestTimes:
        if times.request_id not in self._stopped:
            return times
        self._stopped.remove(times.request_id)
        return msgspec.structs.replace(times, finish_reason=FinishReason.STOP)


def merge(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one choice as one."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        index=first.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        num_cached_tokens=next(
            (delta.num_cached_tokens for delta in deltas if delta.num_cached_tokens is not None), None
        ),
        num_pinned_tokens=next(
            (delta.num_pinned_tokens for delta in deltas if delta.num_pinned_tokens is not None), None
        ),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )


def _error(event: TokenEvent) -> OctavoError:
    """The error an event tells of, as the class that has its code."""
    message = event.error_message or "the engine failed; the request may be sent again"
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, OctavoError) and kind.code == event.error_code:
            return kind(message)
    return EngineError(message)
