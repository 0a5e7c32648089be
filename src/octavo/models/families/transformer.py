"""What all families of the plain pre-norm transformer share: keys, tensor names, checks.

A family overrides what differs. Source of the GGUF keys and names: ggml-org/ggml docs/gguf.md; of the others: the
config classes of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelFileError
from octavo.models.families.fields import Fields
from octavo.models.families.rope import gguf_rope, hf_rope
from octavo.models.spec import ModelSpec
from octavo.ops import RopeStyle
from octavo.quant import RawTensor

# Options that would change the arithmetic, with the values at which they do not.
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
}
_HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "use_qk_norm": (False,),
    "no_rope_layers": (),
    "quantization_config": (),
}
_GGUF_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HF_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
MAX_LAYERS = 4096
MAX_HEAD_DIM = 4096
"""Bounds that no known model comes near: what is built per layer or per head stays small whatever a file claims."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


class Transformer:
    """Base of the families, itself none: see `Family` for what the methods promise."""

    name: str
    gguf_architectures: tuple[str, ...]
    hf_architectures: tuple[str, ...]
    gguf_rope_style = RopeStyle.HALVES
    always_qkv_bias = False

    def from_gguf(self, metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> ModelSpec:
        """Biases and the tied head are told by which tensors the file holds."""
        fields = Fields(metadata, source="GGUF key", prefix=f"{metadata['general.architecture']}.")
        fields.refuse_unless_neutral(_GGUF_NEUTRAL)
        embed = tensors.get(_GGUF_NAMES["embed"])
        hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
        head_dim = _head_dim(fields, "attention.key_length", hidden, heads)
        if fields.size("attention.value_length", head_dim) != head_dim:
            raise ModelFileError(f"{fields.name('attention.value_length')} differs from the key length, {head_dim}")
        layers, context = fields.size("block_count", maximum=MAX_LAYERS), fields.size("context_length")
        window = fields.size("attention.sliding_window", 0, minimum=0)
        return _checked(
            ModelSpec(
                family=self.name,
                num_layers=layers,
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=fields.size("attention.head_count_kv", heads),
                head_dim=head_dim,
                ffn=fields.size("feed_forward_length"),
                vocab_size=fields.size("vocab_size", embed.shape[0] if embed and embed.shape else None),
                max_context=context,
                norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
                rope=gguf_rope(fields, tensors, head_dim=head_dim, style=self.gguf_rope_style),
                qkv_bias=self.always_qkv_bias or "blk.0.attn_q.bias" in tensors,
                output_bias="blk.0.attn_output.bias" in tensors,
                mlp_bias="blk.0.ffn_up.bias" in tensors,
                tied_head=_GGUF_NAMES["head"] not in tensors,
                windows=(window,) * layers if 0 < window < context else (),
            )
        )

    def from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """Sizes are required; what a key's absence means is the default of transformers."""
        fields = Fields(config, source="config.json key")
        fields.refuse_unless_neutral(_HF_NEUTRAL)
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        head_dim = _head_dim(fields, "head_dim", hidden, heads)
        layers, context = fields.size("num_hidden_layers", maximum=MAX_LAYERS), fields.size("max_position_embeddings")
        windows = tuple(window if window and window < context else None for window in self.hf_windows(fields, layers))
        return _checked(
            ModelSpec(
                family=self.name,
                num_layers=layers,
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=fields.size("num_key_value_heads", heads),
                head_dim=head_dim,
                ffn=fields.size("intermediate_size"),
                vocab_size=fields.size("vocab_size"),
                max_context=context,
                norm_eps=fields.number("rms_norm_eps", 1e-6),
                rope=hf_rope(fields, head_dim=head_dim),
                qkv_bias=self.always_qkv_bias or fields.flag("attention_bias", False),
                output_bias=not self.always_qkv_bias and fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                tied_head=fields.flag("tie_word_embeddings", False),
                windows=windows if any(windows) else (),
            )
        )

    def hf_windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        """Attention window of each layer by config.json, None for full; the base family has no windows."""
        return (None,) * num_layers

    def gguf_names(self, spec: ModelSpec) -> Mapping[str, str]:
        """The names `blk.LAYER.PART.weight` and `.bias`."""
        return _source_names(spec, _GGUF_NAMES, "blk.", _GGUF_LAYER_NAMES)

    def hf_names(self, spec: ModelSpec) -> Mapping[str, str]:
        """The names `model.layers.LAYER.PART.weight` and `.bias`."""
        return _source_names(spec, _HF_NAMES, "model.layers.", _HF_LAYER_NAMES)


def layer_type_windows(fields: Fields, window: int, num_layers: int) -> tuple[int | None, ...]:
    """Windows by the list `layer_types` of newer configs."""
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= set(_LAYER_TYPES):
        raise ModelFileError(f"{fields.name('layer_types')} must list {num_layers} of {', '.join(_LAYER_TYPES)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    if key not in fields and hidden % heads:
        raise ModelFileError(f"{fields.name(key)} is missing, and hidden size {hidden} is no multiple of {heads} heads")
    return fields.size(key, hidden // heads, maximum=MAX_HEAD_DIM)


def _checked(spec: ModelSpec) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelFileError(f"{spec.num_heads} attention heads are no multiple of {spec.num_kv_heads} key-value heads")
    return spec


def _source_names(
    spec: ModelSpec, names: Mapping[str, str], prefix: str, layer_names: Mapping[str, str]
) -> dict[str, str]:
    source: dict[str, str] = {}
    for canonical in spec.weight_shapes():
        if canonical in names:
            source[canonical] = names[canonical]
            continue
        _, layer, part = canonical.split(".")
        suffix = ".bias" if part.endswith("_bias") else ".weight"
        source[canonical] = f"{prefix}{layer}.{layer_names[part.removesuffix('_bias')]}{suffix}"
    return source
