"""The golden data of SmolLM2 and the full logits of the reference backend on it, computed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from octavo.backends.numpy import NumpyBackend
from octavo.loaders.checkpoint import Checkpoint, open_gguf
from octavo.runner.load import load_model
from support.driver import layout_for, run
from support.golden import Item, golden_items, sequence


@pytest.fixture(scope="session")
def golden() -> list[Item]:
    return golden_items()


@pytest.fixture(scope="session")
def checkpoint(smollm2: Path) -> Checkpoint:
    return open_gguf(smollm2, name="smollm2-135m")


@pytest.fixture(scope="session")
def reference_logits(checkpoint: Checkpoint, golden: list[Item]) -> list[npt.NDArray[np.float32]]:
    """Teacher-forced: logits [len, vocab] of every item's prompt and greedy tokens but the last."""
    loaded = load_model(checkpoint, NumpyBackend())
    layout = layout_for(loaded.spec)
    loaded.model.allocate_kv(layout)
    sequences = [sequence(item) for item in golden]
    parts = [sequences[first : first + 5] for first in range(0, len(sequences), 5)]  # larger products, bounded logits
    return [logits for part in parts for logits in run(loaded.model, layout, part)]
