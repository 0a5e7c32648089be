"""Splits a model's output into reasoning, content and tool calls. Knows no tokens, no HTTP and no requests.

The outcome depends on the text alone, never on how it was cut into pushes.
"""

from __future__ import annotations

from octavo.text.calls.machine import END, Kind, Parser, Piece, Steps

REASONING_FORMATS: dict[str, bool] = {"deepseek_r1": True, "qwen3": False, "glm45": False}
"""Whether an output reasons from its start although no `<think>` stands there."""
THINK, THINK_END = "<think>", "</think>"


class ReasoningParser(Parser):
    """`<think>reasoning</think>content`. Line breaks at the ends of reasoning and at the start of content are dropped.

    `begun`: the output starts within reasoning.
    """

    markers = (THINK, THINK_END)

    def __init__(self, *, begun: bool) -> None:
        self._begun = begun
        self._line_breaks = ""
        self._trim_lines = False
        self._starts = True
        super().__init__()

    def _run(self) -> Steps:
        self.record()
        character = yield from self.next_visible()
        self.unread(character)
        marked = (yield from self.exactly(THINK)) != END
        start = self.recorded()
        if marked or self._begun:
            if not marked:
                self._reason(start)
            if (yield from self.until((THINK_END,), self._reason)) == END:
                return
            self._trim_lines = True
        else:
            self._add(Kind.CONTENT, start)
        yield from self.rest(self._answer)

    def _reason(self, text: str) -> None:
        """Adds reasoning, less the line breaks at its ends."""
        if self._starts:
            text = text.lstrip("\r\n")
            self._starts = not text
        text = self._line_breaks + text
        bare = text.rstrip("\r\n")
        self._line_breaks = text[len(bare) :]
        self._add(Kind.REASONING, bare)

    def _answer(self, text: str) -> None:
        if self._trim_lines:
            text = text.lstrip("\r\n")
            self._trim_lines = not text
        self._add(Kind.CONTENT, text)


class Router:
    """An output's parsers one after the other: reasoning first, calls in what is left. Either may be absent."""

    def __init__(self, reasoning: ReasoningParser | None, calls: Parser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[Piece]:
        """What is certain after this text."""
        if self._reasoning is None:
            return self._parse(text)
        return self._route(self._reasoning.push(text))

    def flush(self) -> list[Piece]:
        """The output has ended: what was held back."""
        pieces = [] if self._reasoning is None else self._route(self._reasoning.flush())
        return pieces if self._calls is None else pieces + self._calls.flush()

    def _route(self, pieces: list[Piece]) -> list[Piece]:
        routed: list[Piece] = []
        for piece in pieces:
            routed += self._parse(piece.text) if piece.kind is Kind.CONTENT else [piece]
        return routed

    def _parse(self, text: str) -> list[Piece]:
        if self._calls is None:
            return [Piece(Kind.CONTENT, text)] if text else []
        return self._calls.push(text)
