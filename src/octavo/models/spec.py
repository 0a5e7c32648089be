"""What a model is, as data: the shape that one forward (`octavo.models.decoder`) needs, and the names of its weights.

A family maps a checkpoint's own config and tensor names to these. Knows nothing of files, backends or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from octavo.contracts import KVGroup, Retention
from octavo.ops import Activation, Rope


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

    def kv_groups(self, bytes_per_value: float) -> tuple[KVGroup, ...]:
        """Layers grouped by retention rule, full attention first, then windows ascending."""
        by_window: dict[int | None, list[int]] = {}
        for layer in range(self.num_layers):
            by_window.setdefault(self.window(layer), []).append(layer)
        per_layer = int(2 * self.num_kv_heads * self.head_dim * bytes_per_value)
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

    Canonical names: `embed`, `head`, `norm`, and per layer i `layers.i.` + `attn_norm`, `q`, `k`, `v`, `o`, `q_bias`, `k_bias`,
    `v_bias`, `o_bias`, `mlp_norm`, `gate`, `up`, `down`, `gate_bias`, `up_bias`, `down_bias`.
    """

    @property
    def gguf_architectures(self) -> tuple[str, ...]:
        """Values of `general.architecture` it takes."""
        ...

    @property
    def hf_architectures(self) -> tuple[str, ...]:
        """Values of `architectures[0]` in config.json it takes."""
        ...

    def from_gguf(self, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> ModelSpec:
        """Spec from GGUF metadata and the shapes of the file's tensors. Raises UnsupportedModelError, ModelFileError."""
        ...

    def from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """Spec from config.json. Raises UnsupportedModelError, ModelFileError."""
        ...

    def gguf_names(self, spec: ModelSpec) -> Mapping[str, str]:
        """Canonical name -> name in a GGUF file, for every tensor the spec needs."""
        ...

    def hf_names(self, spec: ModelSpec) -> Mapping[str, str]:
        """Canonical name -> name in safetensors files, for every tensor the spec needs."""
        ...
