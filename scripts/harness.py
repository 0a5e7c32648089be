"""What the scripts share that watch a real server: the tests' own way to run one, what is to stay as it is, and what must not grow."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.bench import results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.live import Live, live  # noqa: E402 - made importable above

__all__ = ["ROOT", "Live", "growth", "known_answer", "live", "observe", "write_result"]

GROWTH_LIMIT_BYTES = 24 * 2**20
WORKER_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""asyncio's pool, which long bodies use, starts its threads one by one when they are first needed; a leak goes beyond it."""


def known_answer(server: Live) -> Any:
    """An answer that no load may change."""
    return server.chat("What is the capital of France?", max_tokens=12, logprobs=True).json()["choices"]


def observe(server: Live) -> dict[str, int]:
    """What a leak would make grow."""
    process = Path(f"/proc/{server.process.pid}")
    return {
        "rss_bytes": server.rss_bytes(),
        "threads": len(list((process / "task").iterdir())),
        "file_descriptors": len(list((process / "fd").iterdir())),
    }


def growth(observations: Sequence[Mapping[str, int]]) -> list[str]:
    """What grew from the first to the last; memory from the second, as the first round warms caches and allocators up."""
    first, last = observations[0], observations[-1]
    faults = []
    if last["threads"] > first["threads"] + WORKER_THREADS:
        faults.append(f"threads grew from {first['threads']} to {last['threads']}")
    if last["file_descriptors"] > first["file_descriptors"] + 4:
        faults.append(f"file descriptors grew from {first['file_descriptors']} to {last['file_descriptors']}")
    if (grown := last["rss_bytes"] - observations[1]["rss_bytes"]) > GROWTH_LIMIT_BYTES:
        faults.append(f"memory grew by {grown / 2**20:.0f} MiB")
    return faults


def write_result(result: Mapping[str, Any]) -> None:
    """Keeps a result under benchmarks/results."""
    print(f"written to {results.write(result, folder=ROOT / results.RESULTS_FOLDER)}")
