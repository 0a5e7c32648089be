"""A choice's text as OpenAI's message: content, reasoning and tool calls, whole or in deltas. Knows no HTTP and no tokens."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import UNSET

from octavo.contracts import FinishReason
from octavo.frontend.tools import Calling, Reading
from octavo.server.protocol import ChatDelta, ChatMessage, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from octavo.text.calls import Kind, Piece

_ID_CHARACTERS = string.ascii_letters + string.digits


class MessageReader:
    """Reads one choice. `with_reasoning`: reasoning is told, not left out."""

    def __init__(self, reading: Reading, *, with_reasoning: bool = True) -> None:
        self._router = reading.router()
        self._named = reading.tools.calling is Calling.NAMED
        # Mistral's templates insist on nine characters.
        self._id_prefix, self._id_length = ("", 9) if reading.call_format == "mistral" else ("call_", 24)
        self._with_reasoning = with_reasoning
        self._num_calls = 0

    def deltas(self, text: str, *, last: bool) -> list[ChatDelta]:
        """What a piece of the text adds, in the order in which it was said; `last`: it is the end."""
        if self._router is None:
            return [ChatDelta(content=text)] if text else []
        pieces = self._router.push(text)
        if last:
            pieces += self._router.flush()
        deltas: list[ChatDelta] = []
        for kind, run in groupby(pieces, key=_shown_as):
            match kind:
                case Kind.CONTENT:
                    deltas.append(ChatDelta(content=_joined(run)))
                case Kind.REASONING:
                    if self._with_reasoning:
                        thought = _joined(run)
                        deltas.append(ChatDelta(reasoning=thought, reasoning_content=thought))
                case _:
                    if calls := self._calls(run):
                        deltas.append(ChatDelta(tool_calls=calls))
        return deltas

    def message(self, text: str, *, before: str = "") -> ChatMessage:
        """The whole message. `before`: content that stands before it."""
        deltas = self.deltas(text, last=True)
        calls = _whole_calls(delta.tool_calls for delta in deltas if delta.tool_calls is not UNSET)
        content = before + "".join(delta.content for delta in deltas if delta.content is not UNSET)
        reasoning = "".join(delta.reasoning for delta in deltas if delta.reasoning is not UNSET) or UNSET
        empty = not content and (calls or reasoning is not UNSET)
        return ChatMessage(
            None if empty else content,
            tool_calls=calls or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def finish_reason(self, reason: FinishReason) -> str:
        """Why the choice ended, as its client is told. A named call ends with "stop", as OpenAI's does."""
        if reason is FinishReason.STOP and self._num_calls and not self._named:
            return "tool_calls"
        return str(reason)

    def _calls(self, pieces: Iterable[Piece]) -> list[ToolCallDelta]:
        """Each call's pieces put together."""
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            if piece.kind is Kind.CALL:
                self._num_calls += 1
                first = FunctionDelta(name=piece.text, arguments="")
                deltas.append(ToolCallDelta(self._num_calls - 1, first, id=self._new_id(), type="function"))
            elif piece.kind is Kind.ARGUMENTS:
                index = self._num_calls - 1
                if deltas and deltas[-1].index == index:
                    function = deltas[-1].function
                    joined = FunctionDelta(function.name, f"{function.arguments or ''}{piece.text}")
                    deltas[-1] = ToolCallDelta(index, joined, deltas[-1].id, deltas[-1].type)
                else:
                    deltas.append(ToolCallDelta(index, FunctionDelta(arguments=piece.text)))
        return deltas

    def _new_id(self) -> str:
        return self._id_prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._id_length))


def _shown_as(piece: Piece) -> Kind:
    return Kind.CALL if piece.kind is Kind.ARGUMENTS else piece.kind


def _joined(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _whole_calls(deltas: Iterable[Sequence[ToolCallDelta]]) -> list[ToolCall]:
    return [
        ToolCall(str(delta.id), FunctionCall(str(delta.function.name), str(delta.function.arguments)))
        for of_run in deltas
        for delta in of_run
    ]
