"""Llama 1 to 3, models of its shape (SmolLM2), and Mistral, which adds an attention window over all layers."""

from __future__ import annotations

from octavo.models.families.fields import Fields
from octavo.models.families.transformer import Transformer
from octavo.ops import RopeStyle


class Llama(Transformer):
    """The GGUF converter permutes Q and K of this architecture, therefore its rotary pairs are interleaved."""

    name = "llama"
    gguf_architectures = ("llama",)
    hf_architectures = ("LlamaForCausalLM",)
    gguf_rope_style = RopeStyle.INTERLEAVED


class Mistral(Transformer):
    """In GGUF files Mistral models call themselves llama."""

    name = "mistral"
    gguf_architectures = ()
    hf_architectures = ("MistralForCausalLM",)

    def hf_windows(self, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        """One window for all layers, off when `sliding_window` is null; transformers takes 4096 when it is absent."""
        window = None if fields.is_null("sliding_window") else fields.size("sliding_window", 4096)
        return (window,) * num_layers
