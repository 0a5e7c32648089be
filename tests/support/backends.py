"""Backends under test: the reference, and the native one per instruction set that this machine runs."""

from __future__ import annotations

from octavo.backends.base import Backend
from octavo.backends.cpu import _native
from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.numpy import NumpyBackend

ISAS: tuple[str, ...] = tuple(_native.available_isas())
"""Slowest first; the first is portable."""
BACKENDS = ("numpy", *(f"cpu-{isa}" for isa in ISAS))


def make(name: str, *, threads: int = 1) -> Backend:
    """A backend by one of the names above."""
    if name == "numpy":
        return NumpyBackend()
    return CpuBackend(threads=threads, isa=name.removeprefix("cpu-"))
