"""Qwen2 and Qwen2.5: the Llama shape with biases on Q, K and V, and optionally a window over the upper layers."""

from __future__ import annotations

from octavo.models.families.fields import Fields
from octavo.models.families.transformer import Transformer, layer_type_windows


class Qwen2(Transformer):
    """Q, K and V always have biases; no other projection does."""

    name = "qwen2"
    gguf_architectures = ("qwen2",)
    hf_architectures = ("Qwen2ForCausalLM",)
    always_qkv_bias = True

    def hf_windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        """With `use_sliding_window`, the layers from `max_window_layers` on, or those that `layer_types` says."""
        if not fields.flag("use_sliding_window", False):
            return (None,) * num_layers
        window = fields.size("sliding_window")
        if "layer_types" in fields:
            return layer_type_windows(fields, window, num_layers)
        full = fields.size("max_window_layers", minimum=0)
        return tuple(window if layer >= full else None for layer in range(num_layers))
