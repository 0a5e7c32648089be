"""The typed event log: the only emitter of facts about the running server. Metrics, traces and log files are sinks of it.

An event is a frozen value; a sink is a callable. A sink that raises is reported once and dropped: observability never stops generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from octavo.contracts import StepStats

_log = logging.getLogger("octavo")


class StepCompleted(msgspec.Struct, frozen=True):
    """The engine finished a step, or reports while idle."""

    stats: StepStats


class RequestReceived(msgspec.Struct, frozen=True):
    """A request passed validation and admission. `choices` is its number of sequences."""

    request_id: str
    endpoint: str
    tenant: str
    num_prompt_tokens: int
    choices: int


class RequestRefused(msgspec.Struct, frozen=True):
    """A request was refused at the door."""

    endpoint: str
    status: int
    code: str


class HttpRequestDone(msgspec.Struct, frozen=True):
    """An HTTP exchange ended; `handler` is the route's pattern, never a client's path."""

    handler: str
    method: str
    status: int
    duration_s: float


class EngineStateChanged(msgspec.Struct, frozen=True):
    """The engine became loading, ready, draining or dead."""

    state: str
    reason: str = ""


Event = StepCompleted | RequestReceived | RequestRefused | HttpRequestDone | EngineStateChanged
Sink = Callable[[Event], None]


class EventLog:
    """Passes each event to all sinks, in the order they were added. Called from one thread (the event loop)."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        """Adds a sink for all later events."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Passes an event on. Never raises."""
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except Exception:  # noqa: BLE001 - a broken sink must not stop generation
                _log.exception("an event sink failed and was removed")
                self._sinks.remove(sink)
