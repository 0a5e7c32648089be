"""Families: real configs give the right specs; untrusted values are refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models import ModelSpec, find_family
from octavo.ops import RopeStyle
from octavo.quant import Format
from support.tiny_models import raw_tensor

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 16384,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM2_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
}
LLAMA = find_family("hf", "LlamaForCausalLM")
GGUF = find_family("gguf", "llama")


def llama3(frequency: float) -> float:
    """The formula of Llama 3.1's reference code, written out again."""
    wavelength = 2 * math.pi / frequency
    if wavelength > 8192 / 1.0:
        return frequency / 32
    if wavelength < 8192 / 4.0:
        return frequency
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 32 + smooth * frequency


def test_llama_3_2() -> None:
    spec = LLAMA.from_hf(LLAMA_3_2_1B)
    assert (spec.hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn) == (2048, 32, 8, 64, 8192)
    assert (spec.num_layers, spec.vocab_size, spec.max_context, spec.norm_eps) == (16, 128256, 131072, 1e-5)
    assert spec.tied_head and not spec.qkv_bias and not spec.mlp_bias and spec.windows == ()
    assert spec.rope.style is RopeStyle.HALVES
    plain = [500000.0 ** (-2 * pair / 64) for pair in range(32)]
    assert spec.rope.inverse_frequencies == pytest.approx([llama3(frequency) for frequency in plain], rel=1e-12)
    assert spec.rope.inverse_frequencies[0] == plain[0]
    assert spec.rope.inverse_frequencies[-1] == pytest.approx(plain[-1] / 32)


def test_rope_parameters_of_newer_configs_mean_the_same() -> None:
    newer = {key: value for key, value in LLAMA_3_2_1B.items() if not key.startswith("rope")}
    newer["rope_parameters"] = {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0}
    assert LLAMA.from_hf(newer) == LLAMA.from_hf(LLAMA_3_2_1B)


def test_linear_rope_scaling() -> None:
    scaled = LLAMA.from_hf({**LLAMA_3_2_1B, "rope_scaling": {"type": "linear", "factor": 4.0}})
    plain = LLAMA.from_hf({**LLAMA_3_2_1B, "rope_scaling": None})
    assert scaled.rope.inverse_frequencies == pytest.approx([f / 4 for f in plain.rope.inverse_frequencies])
    gguf = {**SMOLLM2_GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert GGUF.from_gguf(gguf, {}).rope.inverse_frequencies[0] == 0.25


def test_mistral_window_covers_all_layers() -> None:
    family = find_family("hf", "MistralForCausalLM")
    assert family.from_hf(MISTRAL).windows == (4096,) * 32
    assert family.from_hf({**MISTRAL, "sliding_window": None}).windows == ()
    assert family.from_hf({**MISTRAL, "sliding_window": 32768}).windows == ()
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert family.from_hf(absent).windows == (4096,) * 32


def test_qwen2_biases_and_windows() -> None:
    family = find_family("hf", "Qwen2ForCausalLM")
    spec = family.from_hf(QWEN2)
    assert spec.qkv_bias and not spec.output_bias and not spec.mlp_bias and spec.windows == ()
    windowed = family.from_hf({**QWEN2, "use_sliding_window": True})
    assert windowed.windows == (None,) * 21 + (16384,) * 3
    assert [group.window for group in windowed.kv_groups(2.0)] == [None, 16384]
    kinds = ["sliding_attention", "full_attention"] * 12
    listed = family.from_hf({**QWEN2, "use_sliding_window": True, "layer_types": kinds})
    assert listed.windows == (16384, None) * 12
    with pytest.raises(ModelFileError, match="layer_types"):
        family.from_hf({**QWEN2, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 24})


def test_smollm2_gguf() -> None:
    tensors = {"token_embd.weight": raw_tensor("token_embd.weight", np.zeros((49152, 576)), Format.F32)}
    spec = GGUF.from_gguf(SMOLLM2_GGUF, tensors)
    assert (spec.num_layers, spec.hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert spec.tied_head and spec.rope.style is RopeStyle.INTERLEAVED
    assert [group.bytes_per_token for group in spec.kv_groups(2.0)] == [30 * 2 * 3 * 64 * 2]
    assert [group.bytes_per_token for group in spec.kv_groups(1.0, 4)] == [30 * 2 * 3 * (64 + 4)]
    assert spec.rope.inverse_frequencies[1] == pytest.approx(100000.0 ** (-2 / 64))
    names = GGUF.gguf_names(spec)
    assert list(names) == list(spec.weight_shapes())
    assert names["layers.29.down"] == "blk.29.ffn_down.weight" and "head" not in names
    without_size = {key: value for key, value in SMOLLM2_GGUF.items() if key != "llama.vocab_size"}
    assert GGUF.from_gguf(without_size, tensors).vocab_size == 49152


def test_gguf_rope_factors_divide_the_frequencies() -> None:
    factors = np.linspace(1, 8, 32)
    tensors = {"rope_freqs.weight": raw_tensor("rope_freqs.weight", factors, Format.F32)}
    plain, scaled = GGUF.from_gguf(SMOLLM2_GGUF, {}), GGUF.from_gguf(SMOLLM2_GGUF, tensors)
    expected = np.array(plain.rope.inverse_frequencies) / factors.astype(np.float32)
    assert scaled.rope.inverse_frequencies == pytest.approx(expected, rel=1e-12)
    short = {"rope_freqs.weight": raw_tensor("rope_freqs.weight", factors[:-1], Format.F32)}
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        GGUF.from_gguf(SMOLLM2_GGUF, short)
    zero = {"rope_freqs.weight": raw_tensor("rope_freqs.weight", factors * 0, Format.F32)}
    with pytest.raises(ModelFileError, match="positive"):
        GGUF.from_gguf(SMOLLM2_GGUF, zero)


def test_biases_are_named() -> None:
    spec = LLAMA.from_hf({**LLAMA_3_2_1B, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False})
    names, shapes = LLAMA.hf_names(spec), spec.weight_shapes()
    assert names["layers.0.q_bias"] == "model.layers.0.self_attn.q_proj.bias"
    assert names["layers.3.down_bias"] == "model.layers.3.mlp.down_proj.bias"
    assert names["head"] == "lm_head.weight"
    assert shapes["layers.0.k_bias"] == (512,) and shapes["layers.0.o_bias"] == (2048,)
    assert shapes["layers.0.gate_bias"] == (8192,)


@pytest.mark.parametrize(("kind", "name"), [("gguf", "mamba"), ("hf", "GPT2LMHeadModel"), ("gguf", "LlamaForCausalLM")])
def test_unknown_architecture_is_refused_by_name(kind: Any, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name) as caught:
        find_family(kind, name)
    assert ("qwen2" if kind == "gguf" else "Qwen2ForCausalLM") in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "longrope"}),
        ("hidden_act", "gelu"),
        ("num_local_experts", 8),
        ("final_logit_softcapping", 30.0),
        ("attention_multiplier", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_hf_options_that_change_the_arithmetic_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        LLAMA.from_hf({**LLAMA_3_2_1B, key: value})
    assert "config.json" in caught.value.message and len(caught.value.message) < 300
    assert (key if not isinstance(value, dict) or key != "rope_scaling" else "type") in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attn_logit_softcapping", 50.0),
        ("rope.scaling.type", "yarn"),
        ("attention.sliding_window_pattern", [True, False]),
        ("logit_scale", 0.5),
    ],
)
def test_gguf_options_that_change_the_arithmetic_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"llama.{key}"):
        GGUF.from_gguf({**SMOLLM2_GGUF, f"llama.{key}": value}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -8),
        ("hidden_size", 2048.0),
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 5),
        ("head_dim", 63),
        ("head_dim", 10**6),
        ("num_attention_heads", None),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", 0.5),
        ("rope_theta", math.inf),
        ("rope_theta", 10**400),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e-320}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", "linear"),
        ("partial_rotary_factor", 1e308),
        ("tie_word_embeddings", "yes"),
        ("vocab_size", 2**40),
    ],
)
def test_bad_values_are_named(key: str, value: Any) -> None:
    config = {**LLAMA_3_2_1B, key: value}
    if key == "partial_rotary_factor":
        config |= {"head_dim": 63}
    if key == "num_attention_heads":
        del config["head_dim"]
    with pytest.raises(ModelFileError) as caught:
        LLAMA.from_hf(config)
    assert "\n" not in caught.value.message and len(caught.value.message) < 300


def test_per_layer_head_counts_are_refused() -> None:
    with pytest.raises(ModelFileError, match="head_count_kv"):
        GGUF.from_gguf({**SMOLLM2_GGUF, "llama.attention.head_count_kv": [3] * 30}, {})


def test_different_key_and_value_lengths_are_refused() -> None:
    metadata = {**SMOLLM2_GGUF, "llama.attention.key_length": 64, "llama.attention.value_length": 32}
    with pytest.raises(ModelFileError, match="value_length"):
        GGUF.from_gguf(metadata, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("type\n\0'", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("type", "factor")), inner),
    max_leaves=6,
)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(st.dictionaries(st.sampled_from(sorted({*LLAMA_3_2_1B, *QWEN2})), JSON, max_size=4))
def test_any_config_gives_a_spec_or_a_typed_error(changes: dict[str, Any]) -> None:
    for architecture, base in (("LlamaForCausalLM", LLAMA_3_2_1B), ("Qwen2ForCausalLM", QWEN2)):
        try:
            spec = find_family("hf", architecture).from_hf({**base, **json.loads(json.dumps(changes))})
        except ModelFileError as error:
            assert "\n" not in error.message
        else:
            assert isinstance(spec, ModelSpec)
            assert spec.num_heads % spec.num_kv_heads == 0


@relaxed
@given(st.dictionaries(st.sampled_from(sorted(set(SMOLLM2_GGUF) - {"general.architecture"})), JSON, max_size=4))
def test_any_metadata_gives_a_spec_or_a_typed_error(changes: dict[str, Any]) -> None:
    try:
        spec = GGUF.from_gguf({**SMOLLM2_GGUF, **changes}, {})
    except ModelFileError as error:
        assert "\n" not in error.message
    else:
        assert len(spec.weight_shapes()) == len(GGUF.gguf_names(spec))
