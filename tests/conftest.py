"""Shared fixtures. `support` is importable because this folder is put on the path."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Before numpy is imported: OpenBLAS threads spin at barriers, and take ten times as long when the cores are shared.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

# A shell has its background jobs ignore it, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, fetched once into the cache. Fails rather than skips: the suite is about this model."""
    from octavo.loaders.catalogue import ensure

    return ensure("smollm2-135m")
