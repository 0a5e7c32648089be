"""The golden data of SmolLM2: see tests/golden/README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Item = dict[str, Any]


def golden_items() -> list[Item]:
    """All items."""
    data = json.loads((Path(__file__).parent.parent / "golden" / "smollm2-135m.json").read_text())
    items: list[Item] = data["items"]
    return items


def sequence(item: Item) -> list[int]:
    """Prompt and greedy tokens but the last: those whose next token is known."""
    return [*item["prompt_ids"], *item["greedy_ids"][:-1]]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Log-probabilities [rows, vocab] in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized
