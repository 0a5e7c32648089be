"""Stop strings over a stream of text. Knows neither tokens nor requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.errors import InvalidRequestError


class StopMatcher:
    """Cuts a stream of text at the earliest stop string, and releases text as soon as it can no longer be part of one.

    Of all occurrences in the whole text the one that *starts* first wins, and of those with the same start the shortest,
    which is the one that is complete first. The outcome depends on the text alone, never on how it was cut into pushes.
    The price: while the beginning of a longer stop string is still open, a complete one that starts later has to wait.

    Source: Aho and Corasick, "Efficient string matching", 1975. Time is linear in the text, whatever the stop strings;
    never more than the longest stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With `include` the released text ends with the stop string, otherwise before it.

        Raises InvalidRequestError for an empty stop string (it would match at once) and for one that is not text.
        """
        for stop in stops:
            if not stop:
                raise InvalidRequestError("stop strings must not be empty", param="stop")
            if not stop.isascii() and any("\ud800" <= character <= "\udfff" for character in stop):
                raise InvalidRequestError(
                    "a stop string holds half of a surrogate pair, which no text holds", param="stop"
                )
        self._include = include
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._children, self._fallback, self._depth, self._longest = _automaton(self._stops)
        self._state = 0
        self._held = ""
        self._match: tuple[int, int] | None = None
        """The best complete match so far while an earlier start is still open: offset in `_held`, index of the stop."""
        self.stopped: str | None = None
        """The stop string that ended the text, once there is one."""

    def push(self, text: str, *, active: bool = True) -> str:
        """Takes the next piece of the stream, returns what can be released.

        Text pushed with `active` False (before `min_tokens` tokens, say) never takes part in a match, not even with one
        of its ends: a stop string must lie within active text as a whole. After `stopped` is set everything is dropped.
        """
        if self.stopped is not None:
            return ""
        if not active:
            released = self.flush()
            return released if self.stopped is not None else released + text
        if self._state == 0 and self._firsts.isdisjoint(text):
            return text
        return self._scan(text)

    def flush(self) -> str:
        """The stream has ended, or is interrupted by inactive text: returns what was held back.

        A complete stop string that was waiting for an earlier, longer one takes effect now and sets `stopped`.
        """
        if self._match is not None:
            return self._stop(*self._match)
        released, self._held, self._state = self._held, "", 0
        return released

    def _scan(self, text: str) -> str:
        buffer = self._held + text
        position = len(self._held)
        state, children, fallback, depth, longest = (
            self._state,
            self._children,
            self._fallback,
            self._depth,
            self._longest,
        )
        match = self._match
        for character in text:
            position += 1
            while (following := children[state].get(character)) is None and state:
                state = fallback[state]
            state = following or 0
            if longest[state] >= 0:
                # Of the stops that end here the longest starts first. One that ended before keeps a start it shares.
                start = position - len(self._stops[longest[state]])
                if match is None or start < match[0]:
                    match = (start, longest[state])
            # The state is the longest open beginning of a stop: nothing still open starts before it.
            if match is not None and match[0] <= position - depth[state]:
                self._held = buffer
                return self._stop(*match)
        open_from = len(buffer) - depth[state]
        self._state = state
        self._held = buffer[open_from:]
        self._match = None if match is None else (match[0] - open_from, match[1])
        return buffer[:open_from]

    def _stop(self, start: int, index: int) -> str:
        self.stopped = self._stops[index]
        end = start + len(self.stopped) if self._include else start
        released, self._held, self._match = self._held[:end], "", None
        return released


def _automaton(stops: Sequence[str]) -> tuple[list[dict[str, int]], list[int], list[int], list[int]]:
    """Per state: children by character, the state of its longest proper suffix, its depth, the longest stop ending in it (-1)."""
    children: list[dict[str, int]] = [{}]
    fallback, depth, longest = [0], [0], [-1]
    for index, stop in enumerate(stops):
        state = 0
        for character in stop:
            following = children[state].get(character)
            if following is None:
                following = children[state][character] = len(children)
                children.append({})
                fallback.append(0)
                depth.append(depth[state] + 1)
                longest.append(-1)
            state = following
        if longest[state] < 0:
            longest[state] = index
    queue = deque(children[0].values())
    while queue:
        state = queue.popleft()
        if longest[state] < 0:
            longest[state] = longest[fallback[state]]
        for character, child in children[state].items():
            queue.append(child)
            suffix = fallback[state]
            while character not in children[suffix] and suffix:
                suffix = fallback[suffix]
            fallback[child] = children[suffix].get(character, 0)
    return children, fallback, depth, longest
