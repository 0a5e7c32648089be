"""What compiling one grammar may cost. Numbers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from llguidance import LLParserLimits


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`compile_s`: CPU time. `memory_bytes`: beyond what the helper has."""

    compile_s: float = 10.0
    memory_bytes: int = 512 << 20


MAX_FORCED_BYTES = 16_384
"""Longest text that a grammar may leave no choice in. It is read in one go, some 6 us a byte, in which other streams wait."""

MATCHER_LIMITS = {
    "max_items_in_row": 4_000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 400_000,
    "step_max_items": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 1_000_000,
}
"""llguidance's own bounds. Those of a step bound the time of one mask (some 30 ms and 5 ms), that of lexer states the memory of one source
(1 to 2 kB each)."""


def parser_limits() -> LLParserLimits:
    """`MATCHER_LIMITS` in llguidance's form."""
    from llguidance import LLParserLimits

    return LLParserLimits(**MATCHER_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
