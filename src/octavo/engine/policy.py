"""Who waits, and who is next. A policy is a queue; the scheduler asks for nothing else.

This module does not know blocks, budgets or steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from octavo.contracts import RequestId
from octavo.engine.request import Request


class WaitingQueue(Protocol):
    """Requests that wait for a slot and blocks. No operation may take time linear in their number.

    The order must agree with preemption: what `put_back` returns to the queue comes before everything that never ran.
    """

    def add(self, request: Request) -> None:
        """Takes in a new request."""
        ...

    def put_back(self, request: Request) -> None:
        """Takes in a preempted request; several of one step come in reverse order of their arrival."""
        ...

    def peek(self) -> Request:
        """The next one to run. The queue is not empty."""
        ...

    def remove(self, request: Request) -> None:
        """Takes a request out: it runs, or it was cancelled."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FirstComeFirstServed:
    """By order of `add`, preempted requests at the front. Nobody overtakes, so small requests never starve a large one."""

    def __init__(self) -> None:
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Puts a new request at the end."""
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Puts a preempted request at the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The one at the front."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
