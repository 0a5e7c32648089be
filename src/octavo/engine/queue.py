"""Requests in the order of a key: what waits, and what has a deadline.

A heap whose entries are dropped late: a request that is taken out of the middle leaves its entry behind, which is skipped when it comes to
the front and swept out when half of the heap is such. So adding costs O(log n), and everything else O(1) amortized.

This module does not know what a key means.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from octavo.engine.request import Order, Request


class OrderedQueue:
    """Requests with a key each, lowest first. A request is in it once at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, int, Request]] = []
        self._entries: dict[Request, int] = {}
        """The number of each request's entry that counts."""
        self._num_added = 0

    def add(self, request: Request, order: Order) -> None:
        """Takes in a request that is not in it."""
        self._num_added += 1
        self._entries[request] = self._num_added
        heapq.heappush(self._heap, (order, self._num_added, request))

    def discard(self, request: Request) -> None:
        """Takes a request out, wherever it is, if it is in."""
        if self._entries.pop(request, None) is not None and len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    @property
    def first(self) -> tuple[Order, Request] | None:
        """The lowest key and its request; None when empty."""
        heap = self._heap
        while heap:
            order, number, request = heap[0]
            if self._entries.get(request) == number:
                return order, request
            heapq.heappop(heap)
        return None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._entries)
