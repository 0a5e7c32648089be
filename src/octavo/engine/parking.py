"""Requests that wait for blocks which a running sequence is computing right now, or which come from disk, instead of computing them.

A parked request holds nothing, so it can block nobody. It is ready as soon as what it waits for is there, or never will be: because the
sequence has lost its tables (ended, failed or preempted), or the file was damaged. Then it goes back to the queue and is looked up
anew. This module does not know queues, budgets or steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.contracts import RequestId
from octavo.engine.kv import Awaited
from octavo.engine.offload import Fetch
from octavo.engine.request import Request


class Parking:
    """Parked requests. The scheduler parks no more than could run, so time linear in their number is fine."""

    def __init__(self) -> None:
        self._parked: dict[RequestId, tuple[Request, Awaited | Fetch]] = {}

    def add(self, request: Request, awaited: Awaited | Fetch) -> None:
        """Parks a request until what it waits for is there, or never will be."""
        self._parked[request.request_id] = request, awaited

    def remove(self, request: Request) -> bool:
        """Takes a request out, if it is here."""
        return self._parked.pop(request.request_id, None) is not None

    def take_ready(self) -> list[Request]:
        """Takes out all that need not wait longer, in the order in which they were parked."""
        ready = [request for request, awaited in self._parked.values() if awaited.is_over]
        for request in ready:
            self.remove(request)
        return ready

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._parked.values())
