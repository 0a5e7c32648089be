"""Shared fixtures. `support` is importable because this folder is put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, fetched once into the cache. Fails rather than skips: the suite is about this model."""
    from octavo.loaders.catalogue import ensure

    return ensure("smollm2-135m")
