"""Tiny random-weight models for tests: the committed Hugging Face folders of tests/golden, GGUF files made of them, random tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.loaders.checkpoint import open_folder
from octavo.loaders.gguf_writer import write_gguf
from octavo.models import ModelSpec
from octavo.ops import Rope, RopeStyle
from octavo.quant import Format, RawTensor, dequantize, quantize
from octavo.runner.load import canonical_tensors, read_spec

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = ("tiny-llama", "tiny-llama3", "tiny-mistral", "tiny-qwen2")

_GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
_GGUF_GLOBAL = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_GGUF_LAYER = {"o": "attn_output", "q": "attn_q", "k": "attn_k", "v": "attn_v", "mlp_norm": "ffn_norm"}
_GGUF_LAYER |= {"attn_norm": "attn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def tiny_folder(name: str) -> Path:
    """A committed Hugging Face folder."""
    return GOLDEN / name


def tiny_reference(name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Its prompt ids [T] and the logits [T, vocab] that transformers computed for them."""
    with np.load(tiny_folder(name) / "reference.npz") as reference:
        return reference["prompt_ids"], reference["logits"]


def write_tiny_gguf(path: Path, name: str, form: Format = Format.F32) -> Path:
    """Writes a tiny folder as the GGUF file its converter would make, with matrices in `form` and a byte-level tokenizer.

    As in real files, the embedding of a quantized one is Q8_0; vectors are F32; Q and K of the llama architecture are permuted.
    """
    checkpoint = open_folder(tiny_folder(name), name=name)
    spec = read_spec(checkpoint)
    architecture = _GGUF_ARCHITECTURES[spec.family]
    tensors = []
    for canonical, tensor in canonical_tensors(checkpoint, spec).items():
        weights = dequantize(tensor)
        part = canonical.rsplit(".", 1)[-1]
        if architecture == "llama" and part in ("q", "k", "q_bias", "k_bias"):
            weights = _permuted(weights, spec.num_heads if part[0] == "q" else spec.num_kv_heads)
        target = Format.F32 if weights.ndim == 1 else form
        if form.quantized and canonical in ("embed", "head"):
            target = Format.Q8_0
        tensors.append(raw_tensor(_gguf_name(canonical), weights, target))
    plain = 500.0 if name == "tiny-llama3" else 10000.0
    if name == "tiny-llama3":
        unscaled = plain ** (-2.0 * np.arange(spec.head_dim // 2) / spec.head_dim)
        factors = (unscaled / np.array(spec.rope.inverse_frequencies)).astype(np.float32)
        tensors.append(raw_tensor("rope_freqs.weight", factors, Format.F32))
    write_gguf(path, _gguf_metadata(name, spec, architecture, plain), tensors)
    return path


def raw_tensor(name: str, weights: npt.ArrayLike, form: Format) -> RawTensor:
    """Weights [.., k] as a stored tensor."""
    array = np.asarray(weights, np.float32)
    return RawTensor(name, array.shape, form, quantize(array, form))


def tiny_spec(**changes: Any) -> ModelSpec:
    """A small Llama with sizes that fill no panel or vector evenly where that is allowed."""
    head_dim = changes.get("head_dim", 32)
    sizes: dict[str, Any] = {
        "family": "llama",
        "num_layers": 2,
        "hidden": 64,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": head_dim,
        "ffn": 96,
        "vocab_size": 131,
        "max_context": 512,
        "norm_eps": 1e-5,
        "rope": plain_rope(head_dim, RopeStyle.INTERLEAVED),
        "tied_head": True,
    }
    return ModelSpec(**(sizes | changes))


def plain_rope(head_dim: int, style: RopeStyle, *, rotated: int | None = None, theta: float = 10000.0) -> Rope:
    """Unscaled rotary embedding of the first `rotated` elements of each head."""
    rotated = rotated or head_dim
    frequencies = tuple(theta ** (-2.0 * pair / rotated) for pair in range(rotated // 2))
    return Rope(head_dim=head_dim, style=style, inverse_frequencies=frequencies)


def random_tensors(
    spec: ModelSpec, form: Format, *, seed: int = 0, head_form: Format | None = None
) -> dict[str, RawTensor]:
    """Random weights for a spec: matrices in `form`, embedding and head in `head_form` (default: Q8_0 beside quantized ones)."""
    rng = np.random.default_rng(seed)
    head_form = head_form or (Format.Q8_0 if form.quantized else form)
    tensors = {}
    for name, shape in spec.weight_shapes().items():
        if len(shape) == 1:
            offset = 1.0 if name.endswith("norm") else 0.0
            tensors[name] = raw_tensor(name, offset + 0.2 * rng.standard_normal(shape), Format.F32)
        else:
            weights = rng.standard_normal(shape) * (1.0 if name in ("embed", "head") else 1.5 / np.sqrt(shape[1]))
            tensors[name] = raw_tensor(name, weights, head_form if name in ("embed", "head") else form)
    return tensors


def _permuted(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from halves (i, i + d/2) to interleaved pairs (2i, 2i + 1), as llama.cpp's converter does."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def _gguf_name(canonical: str) -> str:
    if canonical in _GGUF_GLOBAL:
        return f"{_GGUF_GLOBAL[canonical]}.weight"
    _, layer, part = canonical.split(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    return f"blk.{layer}.{_GGUF_LAYER[part.removesuffix('_bias')]}.{kind}"


def _gguf_metadata(name: str, spec: ModelSpec, architecture: str, theta: float) -> Mapping[str, Any]:
    vocab = json.loads((tiny_folder(name) / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    sizes = {
        "block_count": spec.num_layers,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "context_length": spec.max_context,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.freq_base": theta,
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
    }
    if spec.windows and architecture == "llama":
        sizes["attention.sliding_window"] = spec.windows[0]
    template = json.loads((tiny_folder(name) / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "general.architecture": architecture,
        "general.name": name,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [f"{tokens[3]} {tokens[4]}"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": template,
    }
