"""Tiny models of every family: the backends compute what transformers computed, from folders and from GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.numpy import NumpyBackend
from octavo.loaders.checkpoint import Checkpoint, open_folder, open_gguf
from octavo.quant import Format
from octavo.runner.load import load_model
from support.backends import BACKENDS, make
from support.driver import layout_for, run
from support.tiny_models import TINY, tiny_folder, tiny_reference, write_tiny_gguf

LOGITS_WITHIN = 2e-5
"""Float32 math in another order; logits lie within -6..6."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY)
def test_folder_equals_transformers(name: str, backend: str) -> None:
    ids, expected = tiny_reference(name)
    loaded = load_model(open_folder(tiny_folder(name), name=name), make(backend), dtype="float32")
    layout = layout_for(loaded.spec)
    loaded.model.allocate_kv(layout)
    assert len(layout.groups) == (2 if name == "tiny-qwen2" else 1)
    for chunk in (None, 7):
        (logits,) = run(loaded.model, layout, [ids.tolist()], chunk=chunk)
        assert np.abs(logits - expected).max() < LOGITS_WITHIN


def without_windows(name: str, tmp_path: Path) -> Checkpoint:
    """The folder as far as a GGUF file can say it: Qwen2's windows over some layers cannot be said."""
    folder = tmp_path / name
    shutil.copytree(tiny_folder(name), folder)
    config = json.loads((folder / "config.json").read_text())
    if name == "tiny-qwen2":
        config["use_sliding_window"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return open_folder(folder, name=name)


@pytest.mark.parametrize("form", [Format.F32, Format.BF16])
@pytest.mark.parametrize("name", TINY)
def test_gguf_means_the_same_as_the_folder(name: str, form: Format, tmp_path: Path) -> None:
    """Permuted Q and K, RoPE factors, names and keys. The folders hold bfloat16 but for tiny-llama3."""
    ids, _ = tiny_reference(name)
    logits = []
    for checkpoint in (
        without_windows(name, tmp_path),
        open_gguf(write_tiny_gguf(tmp_path / "x.gguf", name, form), name=name),
    ):
        loaded = load_model(checkpoint, NumpyBackend())
        layout = layout_for(loaded.spec)
        loaded.model.allocate_kv(layout)
        logits.append(run(loaded.model, layout, [ids.tolist()])[0])
    rounded = name == "tiny-llama3" and form is Format.BF16
    assert np.abs(logits[0] - logits[1]).max() < (0.2 if rounded else LOGITS_WITHIN)


@pytest.mark.parametrize("form", [Format.Q8_0, Format.Q4_0, Format.Q4_1, Format.F16])
def test_quantized_files_stay_near_the_folder(form: Format, tmp_path: Path) -> None:
    """Not a measure of quality: a wrong nibble order or offset makes logits uncorrelated."""
    name = "tiny-llama"
    ids, expected = tiny_reference(name)
    loaded = load_model(open_gguf(write_tiny_gguf(tmp_path / "x.gguf", name, form), name=name), NumpyBackend())
    layout = layout_for(loaded.spec)
    loaded.model.allocate_kv(layout)
    (logits,) = run(loaded.model, layout, [ids.tolist()])
    correlation = np.corrcoef(logits.ravel(), expected.ravel())[0, 1]
    assert correlation > (0.999 if form in (Format.Q8_0, Format.F16) else 0.9)
