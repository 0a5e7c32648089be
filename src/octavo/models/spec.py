"""What a model is, as data: the shape that one forward (`octavo.models.decoder`) needs, and the shapes of its weights.

A family maps a checkpoint's own config and tensor names to these. Knows nothing of files, backends or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from octavo.contracts import KVGroup, Retention
from octavo.ops import Activation, Rope
from octavo.quant import RawTensor


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes in elements, `max_context` in tokens."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: Rope
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    windows: tuple[int | None, ...] = ()
    """Attention window of each layer, None for full attention. Empty: all layers are full."""

    def window(self, layer: int) -> int | None:
        """Attention window of a layer in tokens, None for full."""
        return self.windows[layer] if self.windows else None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> logical shape of every weight, in the order of use. A tied head has none of its own."""
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden)}
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            shapes[at + "attn_norm"] = (self.hidden,)
            for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                shapes[at + name] = (width, self.hidden)
                if self.qkv_bias:
                    shapes[f"{at}{name}_bias"] = (width,)
            shapes[at + "o"] = (self.hidden, q_width)
            if self.output_bias:
                shapes[at + "o_bias"] = (self.hidden,)
            shapes[at + "mlp_norm"] = (self.hidden,)
            for name, shape in (
                ("gate", (self.ffn, self.hidden)),
                ("up", (self.ffn, self.hidden)),
                ("down", (self.hidden, self.ffn)),
            ):
                shapes[at + name] = shape
                if self.mlp_bias:
                    shapes[f"{at}{name}_bias"] = shape[:1]
        shapes["norm"] = (self.hidden,)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, self.hidden)
        return shapes

    def kv_groups(self, bytes_per_value: float, bytes_per_scale: int = 0) -> tuple[KVGroup, ...]:
        """Layers grouped by retention rule, full attention first, then windows ascending.

        K and V of one token and head take `bytes_per_value` for each of their elements, and `bytes_per_scale` once each.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer in range(self.num_layers):
            by_window.setdefault(self.window(layer), []).append(layer)
        per_layer = 2 * self.num_kv_heads * int(self.head_dim * bytes_per_value + bytes_per_scale)
        return tuple(
            KVGroup(
                layers=tuple(layers),
                retention=Retention.FULL if window is None else Retention.WINDOW,
                window=window,
                bytes_per_token=per_layer * len(layers),
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
            )
            for window, layers in sorted(by_window.items(), key=lambda item: (item[0] is not None, item[0] or 0))
        )


class Family(Protocol):
    """A model family: how its configs map to a spec, and its tensors to canonical names.

    Canonical names: `embed`, `head`, `norm`, and per layer i `layers.i.` + `attn_norm`, `q`, `k`, `v`, `o`, `q_bias`,
    `k_bias`, `v_bias`, `o_bias`, `mlp_norm`, `gate`, `up`, `down`, `gate_bias`, `up_bias`, `down_bias`.
    """

    @property
    def gguf_architectures(self) -> tuple[str, ...]:
        """Values of `general.architecture` it takes."""
        ...

    @property
    def hf_architectures(self) -> tuple[str, ...]:
        """Values of `architectures[0]` in config.json it takes."""
        ...

    def from_gguf(self, metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> ModelSpec:
        """Spec from GGUF metadata and the file's tensors, whose presence, shapes and RoPE factors it uses.

        Raises UnsupportedModelError, ModelFileError.
        """
        ...

    def from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """Spec from config.json. Raises UnsupportedModelError, ModelFileError."""
        ...

    def gguf_names(self, spec: ModelSpec) -> Mapping[str, str]:
        """Canonical name -> name in a GGUF file, for every weight of the spec."""
        ...

    def hf_names(self, spec: ModelSpec) -> Mapping[str, str]:
        """Canonical name -> name in safetensors files, for every weight of the spec."""
        ...
