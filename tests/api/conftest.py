"""Servers that API tests share: one process per session and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.live import Live, live


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[Live]:
    """`octavo serve` with the default model and a small context, so that limits are quick to reach."""
    with live("serve", "--max-model-len", "1024", "--kv-cache-memory", "256M", "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture(scope="session")
def guarded(smollm2: Path) -> Iterator[Live]:
    """The same with keys."""
    with live(
        "serve", "--max-model-len", "512", "--kv-cache-memory", "64M", "--api-key", "alice:sesame", "--api-key", "plain"
    ) as running:
        running.key = "sesame"
        yield running
