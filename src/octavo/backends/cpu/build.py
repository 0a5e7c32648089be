"""Which of the native builds runs here. All give the same bits; they differ in speed."""

from __future__ import annotations

from octavo.backends.cpu import _native
from octavo.errors import ConfigError


def available_isas() -> tuple[str, ...]:
    """Instruction sets that octavo was built for and this CPU runs, slowest first: portable, avx2, avx512."""
    return tuple(_native.available_isas())


def chosen_isa() -> str:
    """The instruction set that OCTAVO_ISA names, else the fastest available. Raises ConfigError when it cannot run here."""
    try:
        return _native.isa()
    except ValueError as error:
        raise ConfigError(f"{error}; unset OCTAVO_ISA to take the fastest", param="OCTAVO_ISA") from error
