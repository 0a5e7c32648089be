"""How long a request may wait, be prefilled and decode, and which requests are over it.

A phase begins when the one before ends, and time in which a request was preempted belongs to the phase it was in. The server's limit and
the request's own both hold. This module does not know how a request is ended, and reads no clock: it is told the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from octavo.config import SchedulerConfig
from octavo.engine.queue import OrderedQueue
from octavo.engine.request import Request
from octavo.errors import DecodeTimeoutError, OctavoError, PrefillTimeoutError, WaitingTimeoutError


class Phase(Enum):
    """WAITING: from arrival until it first runs. PREFILL: until the first token. DECODE: until the end."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()


class Deadlines:
    """The present deadline of each request that has one. Costs nothing where no limit is set."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._waiting_s = config.waiting_timeout
        self._prefill_s = config.prefill_timeout
        self._decode_s = config.decode_timeout
        self._queue = OrderedQueue()

    def begin(self, request: Request, phase: Phase, now_s: float) -> None:
        """A request enters a phase; the deadline of the one before is forgotten."""
        self._queue.discard(request)
        limit_s = self._limit_s(request, phase)
        if limit_s is not None:
            self._queue.add(request, (now_s + limit_s, request.order[1]))

    def end(self, request: Request) -> None:
        """A request ended."""
        self._queue.discard(request)

    def expired(self, now_s: float) -> Iterator[tuple[Request, OctavoError]]:
        """The requests that are over their deadline, each with the error to end it with. The caller calls `end` for each."""
        while (first := self._queue.first) is not None and first[0][0] <= now_s:
            yield first[1], self._error(first[1])

    def _limit_s(self, request: Request, phase: Phase) -> float | None:
        spec = request.spec
        match phase:
            case Phase.WAITING:
                limits = (self._waiting_s, spec.waiting_timeout_s)
            case Phase.PREFILL:
                limits = (self._prefill_s, spec.prefill_timeout_s)
            case Phase.DECODE:
                limits = (self._decode_s, spec.decode_timeout_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def _error(self, request: Request) -> OctavoError:
        if request.scheduled_s is None:
            return WaitingTimeoutError(
                f"the request waited {self._limit_s(request, Phase.WAITING):g} s without its turn; send it again when the server is less "
                "busy, or allow a longer waiting_timeout"
            )
        if request.first_token_s is None:
            return PrefillTimeoutError(
                f"the prompt was not computed within {self._limit_s(request, Phase.PREFILL):g} s; shorten it, or allow a longer "
                "prefill_timeout"
            )
        return DecodeTimeoutError(
            f"the answer was not complete {self._limit_s(request, Phase.DECODE):g} s after its first token; lower max_tokens, or allow a "
            "longer decode_timeout"
        )
