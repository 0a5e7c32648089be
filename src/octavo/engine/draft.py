"""A step while it is being decided: how many tokens each request computes, and what is left for others.

Decoding requests feel every token of a prompt that is computed beside them, so long prompts together get only a bounded part of a step
in which anybody decodes; prompts that are short, which cost little and are waited for, come first in it, few at a time.

A step may be computed in parts, each a forward: then short prompts that start in it get their first token before the others are computed,
and those that come meanwhile need not wait for all of them. To those that decode it is the same: between two of their tokens as much is
computed, in whatever order. For those of the first part that is what comes after it in their step and before it in the next, so the one
counts against the other. This module does not know blocks, slots or policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from octavo.contracts import RowPlan, SlotStart
from octavo.engine.request import Request
from octavo.engine.settings import PrefillBounds

SHORT_PER_CHUNK = 1.5
"""Tokens of prompts in a step beside decodes, as a multiple of what long ones may have, beyond which no further short one starts. By
simulation: less has short ones wait for one another, more gives uneven steps."""

AHEAD_PER_REST = 3
"""Prompts that start go ahead of the others of their step if they have at most so many times their tokens: else waiting for those would
not be much."""

MOST_AHEAD = 2
"""Parts of prompts that go ahead of the first of others; one may before each further. Each is a forward, however few its tokens, so others
would starve beside tiny prompts that keep coming."""

PART = 1.5
"""Least rows of a part of those that decode, as a multiple of what a backend computes at a good rate: every part is told by itself too."""


class Draft:
    """One step to be. `num_decodes` counts the running requests that compute one token each.

    Where short prompts start, they go ahead if others have at least `least_rest` tokens; with `divides` those that decode are computed in
    parts. `num_carried` is `num_late` of the step before.
    """

    __slots__ = (
        "_bounds",
        "_budget",
        "_divides",
        "_least_rest",
        "_num_ahead",
        "_num_carried",
        "_num_decodes",
        "num_late",
        "num_tokens",
        "partial",
        "preempted",
        "repeat",
        "starts",
        "untold",
        "work",
    )

    def __init__(
        self,
        budget: int,
        bounds: PrefillBounds,
        num_decodes: int,
        *,
        least_rest: float,
        divides: bool,
        num_carried: int,
    ) -> None:
        self._budget = budget
        self._bounds = bounds
        self._num_decodes = num_decodes
        self._least_rest = least_rest
        self._divides = divides
        self._num_ahead = 0
        self._num_carried: int | None = num_carried
        """None once a part of those that decode is computed."""
        self.num_late = 0
        """Tokens of prompts that started after that."""
        self.work: dict[Request, int] = {}
        """Tokens to be computed of each request that runs."""
        self.num_tokens = 0
        self.partial: list[Request] = []
        """Those that this step does not compute to the end."""
        self.starts: list[Request] = []
        self.untold: dict[Request, SlotStart] = {}
        """Those that started since a part of the step was given to the executor."""
        self.preempted: set[Request] = set()
        self.repeat = 1
        """How often in a row all compute their one token."""

    @property
    def left(self) -> int:
        """Tokens that may still be given out."""
        return self._budget - self.num_tokens

    @property
    def left_for_long(self) -> int:
        """As `left`, to long prompts."""
        if not self._num_decodes:
            return self.left
        return int(min(self.left, self._bounds.chunk(self._num_decodes) - self._num_beside))

    @property
    def _num_beside(self) -> int:
        """Tokens of prompts between two of those that decode."""
        return self.num_tokens - self._num_decodes + (self._num_carried or 0)

    def has_room_to_start(self, count: int) -> bool:
        """Whether a further short prompt, of which `count` tokens are to be computed, may start in this step. One always may, but for
        room that prompts took which joined the last step late.

        Beside decodes more of them only as long as the step stays about as long as others: neither streams nor who comes next shall wait
        for a heap of them.
        """
        if not (self.starts or self._num_carried) or not self._num_decodes:
            return True
        return self._num_beside + count <= SHORT_PER_CHUNK * self._bounds.chunk(self._num_decodes)

    def assured(self, others_wait: bool) -> int:
        """Tokens that long prompts which run already get before those that wait."""
        chunk = self._bounds.chunk(self._num_decodes)
        if others_wait:
            return int(min(self._budget, max(1.0, chunk / 4)))
        return int(min(self._budget, chunk)) if self._num_decodes else self._budget

    def give(self, request: Request, count: int) -> int:
        """Adds tokens of a request; returns the position after them."""
        total = self.work.get(request, 0) + count
        self.work[request] = total
        self.num_tokens += count
        end = request.num_computed + total
        if end < len(request.token_ids):
            if total == count:
                self.partial.append(request)
        elif total > count:
            self.partial.remove(request)
        return end

    def start(self, request: Request, told: SlotStart) -> None:
        """Notes that a request starts in this step."""
        self.starts.append(request)
        self.untold[request] = told
        if self._num_carried is None:
            self.num_late += self.work[request]

    def next_part(self, rest: Mapping[Request, RowPlan]) -> list[Request]:
        """What is computed next of what is not computed yet: prompts that go ahead, else others."""
        ahead = self._ahead(rest) if self._num_ahead < MOST_AHEAD else []
        if ahead:
            self._num_ahead += 1
            return ahead
        self._num_ahead, self._num_carried = MOST_AHEAD - 1, None
        return self._part(rest)

    def _ahead(self, rest: Mapping[Request, RowPlan]) -> list[Request]:
        """Short prompts that start and end in this step, if waiting for others would be a good part of the time to their first tokens."""
        short = [request for request in self.starts if not request.is_long and request not in self.partial]
        num_short = sum(self.work[request] for request in short)
        others = self.num_tokens - num_short
        if others < self._least_rest or num_short > AHEAD_PER_REST * others:
            return []
        return [request for request in short if request in rest]

    def _part(self, rest: Mapping[Request, RowPlan]) -> list[Request]:
        """The first of about equal parts of those that decode; all where anybody computes more, or parts would be small."""
        if not self._divides or any(row.count > 1 for row in rest.values()):
            return list(rest)
        num_parts = max(1, int(len(rest) / (PART * self._least_rest)))
        return list(islice(rest, -(-len(rest) // num_parts)))

    def drop(self, request: Request) -> None:
        """Takes out a request that is preempted."""
        self.num_tokens -= self.work.pop(request, 0)
        self.preempted.add(request)
        if request in self.partial:
            self.partial.remove(request)
