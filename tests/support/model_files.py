"""Tiny model files for tests: a two-layer Llama with random weights, as GGUF and as a Hugging Face folder."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.loaders.gguf_writer import write_gguf
from octavo.quant import Format, RawTensor, quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 2, 64, 4, 2, 96, 50, 128


def raw_tensor(name: str, weights: np.ndarray, form: Format = Format.F32) -> RawTensor:
    return RawTensor(name=name, shape=weights.shape, format=form, data=quantize(weights, form))


def gguf_metadata() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{i}é" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.scores": [float(-i) for i in range(VOCAB)],
        "tokenizer.chat_template": "{{ messages }}",
    }


def gguf_tensors() -> list[RawTensor]:
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int, form: Format) -> RawTensor:
        return raw_tensor(f"{name}.weight", random.normal(0, 0.05, shape).astype(np.float32), form)

    tensors = [weight("token_embd", VOCAB, HIDDEN, form=Format.Q8_0), weight("output_norm", HIDDEN, form=Format.F32)]
    kv = KV_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        tensors += [
            weight(at + "attn_norm", HIDDEN, form=Format.F32),
            weight(at + "attn_q", HIDDEN, HIDDEN, form=Format.Q4_1),
            weight(at + "attn_k", kv, HIDDEN, form=Format.Q4_0),
            weight(at + "attn_v", kv, HIDDEN, form=Format.BF16),
            weight(at + "attn_output", HIDDEN, HIDDEN, form=Format.F16),
            weight(at + "ffn_norm", HIDDEN, form=Format.F32),
            weight(at + "ffn_gate", FFN, HIDDEN, form=Format.Q8_0),
            weight(at + "ffn_up", FFN, HIDDEN, form=Format.Q8_0),
            weight(at + "ffn_down", HIDDEN, FFN, form=Format.Q4_1),
        ]
    return tensors


def write_tiny_gguf(path: Path, metadata: Mapping[str, Any] | None = None) -> Path:
    write_gguf(path, gguf_metadata() if metadata is None else metadata, gguf_tensors())
    return path


def hf_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }


def hf_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    kv = KV_HEADS * HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{at}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {name: random.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


def write_hf_folder(folder: Path, config: Mapping[str, Any] | None = None, *, shards: int = 1) -> Path:
    """A folder as transformers saves it; with several shards, tensors go round them."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}", "eos_token": "</s>"}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2]}))
    tensors = list(hf_tensors().items())
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(tensors[shard::shards])
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A file with any header, right or wrong."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data
