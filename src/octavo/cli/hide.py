"""Keeps secrets of the command line out of process listings, which every user of the machine can read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def hide_arguments(secrets: Iterable[str]) -> None:
    """Overwrites secrets in this process's own argument memory (proc(5): arg_start and arg_end), as `/proc/PID/cmdline` shows it.

    Where the system does not tell that memory's place, nothing happens.
    """
    import ctypes

    try:
        # The second field, a name in parentheses, may hold spaces.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, LookupError, ValueError):
        return
    if not 0 < start < end:
        return
    arguments = ctypes.string_at(start, end - start)
    for secret in secrets:
        pattern = secret.encode("utf-8", "surrogateescape")
        arguments = arguments.replace(pattern, b"*" * len(pattern))
    ctypes.memmove(start, arguments, len(arguments))
