"""Fuzzing of the model file readers: files mutated by hypothesis may be accepted or refused, never anything else.

`fuzz_reader` is used by the tests with few examples and by long runs with many.
"""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from octavo.errors import OctavoError

MAX_SECONDS = 2.0
"""For one small file. Reading takes well under a millisecond; the rest is for a busy machine."""
MAX_BYTES_PER_FILE_BYTE = 64
MAX_FIXED_BYTES = 1024 * 1024

_INTERESTING = [0, 1, 2, 3, 7, 8, 9, 13, 31, 32, 33, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
_INTERESTING += [2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 32, 2**64 - 8, 2**64 - 1]


@st.composite
def mutated(draw: st.DrawFn, original: bytes, header_bytes: int) -> bytes:
    """`original` after one to six changes, most of them within its first `header_bytes`."""
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 6))):
        reach = len(content) if draw(st.integers(0, 3)) == 0 else min(len(content), header_bytes)
        at = draw(st.integers(0, max(0, reach - 1)))
        match draw(st.sampled_from(["flip", "byte", "number", "cut", "remove", "repeat", "insert"])):
            case "flip":
                content[at : at + 1] = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in content[at : at + 1])
            case "byte":
                content[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "number":
                form = draw(st.sampled_from(["<I", "<Q"]))
                value = draw(st.sampled_from(_INTERESTING)) % (1 << 8 * struct.calcsize(form))
                content[at : at + struct.calcsize(form)] = struct.pack(form, value)
            case "cut":
                del content[at:]
            case "remove":
                del content[at : at + draw(st.integers(1, 40))]
            case "repeat":
                piece = content[at : at + draw(st.integers(1, 40))]
                content[at:at] = piece * draw(st.integers(1, 3))
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(content)


def fuzz_reader(
    read: Callable[[Path], Any],
    original: bytes,
    path: Path,
    *,
    header_bytes: int,
    examples: int,
    derandomize: bool = True,
) -> dict[str, int]:
    """Reads `examples` mutants of a file at `path`; returns how many were accepted and refused.

    Raises AssertionError with the mutant (shrunk by hypothesis) when a read raises anything but an OctavoError, takes more
    than MAX_SECONDS, or allocates beyond what the file's size justifies.
    """
    counts = {"accepted": 0, "refused": 0}

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(mutated(original, header_bytes))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        start = time.perf_counter()
        tracemalloc.start()
        try:
            read(path)
            counts["accepted"] += 1
        except OctavoError as error:
            counts["refused"] += 1
            assert "\n" not in error.message
            assert len(error.message) < 1000
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        seconds = time.perf_counter() - start
        assert seconds < MAX_SECONDS, f"reading took {seconds:.1f} s"
        assert peak < MAX_FIXED_BYTES + MAX_BYTES_PER_FILE_BYTE * len(content), f"reading allocated {peak} bytes"

    check()
    return counts
