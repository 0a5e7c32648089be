"""Parsers of tool calls and reasoning in a model's output, by the names that vLLM gives them."""

from octavo.text.calls.formats import CALL_FORMATS, infer_format
from octavo.text.calls.machine import Kind, Parser, Piece
from octavo.text.calls.router import REASONING_FORMATS, ReasoningParser, Router

__all__ = [
    "CALL_FORMATS",
    "REASONING_FORMATS",
    "Kind",
    "Parser",
    "Piece",
    "ReasoningParser",
    "Router",
    "infer_format",
]
