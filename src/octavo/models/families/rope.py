"""Rotary frequencies from a model's configuration: plain, linearly scaled, or scaled as Llama 3.1 does.

Other scalings (yarn, longrope, dynamic) are refused by name. All arithmetic is in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.families.fields import Fields
from octavo.ops import Rope, RopeStyle
from octavo.quant import Format, RawTensor

FACTORS = "rope_freqs.weight"
"""Tensor of GGUF files whose converter has worked out the scaling: frequency i is divided by its entry i."""


def gguf_rope(fields: Fields, tensors: Mapping[str, RawTensor], *, head_dim: int, style: RopeStyle) -> Rope:
    """RoPE of a GGUF file: keys `rope.*` of its architecture, and the factors tensor where there is one."""
    rotated = fields.size("rope.dimension_count", head_dim)
    frequencies = _frequencies(fields.name("rope.freq_base"), fields.number("rope.freq_base", 10000.0), rotated)
    scaling = fields.text("rope.scaling.type", "none")
    if scaling == "linear":
        factor = fields.number("rope.scaling.factor")
    elif scaling == "none":
        factor = fields.number("rope.scale_linear", 1.0)
    else:
        raise _unsupported(fields.name("rope.scaling.type"), scaling, ("none", "linear"))
    frequencies = [frequency / factor for frequency in frequencies]
    if FACTORS in tensors:
        factors = _factors(tensors[FACTORS], len(frequencies))
        frequencies = [frequency / factor for frequency, factor in zip(frequencies, factors, strict=True)]
    return _rope(head_dim, style, frequencies)


def hf_rope(fields: Fields, *, head_dim: int) -> Rope:
    """RoPE of a config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    scaling = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    frequencies = _frequencies(fields.name("rope_theta"), theta, int(head_dim * min(share, 1.0)))
    kind_key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(kind_key, "default")
    if kind == "linear":
        factor = scaling.number("factor")
        frequencies = [frequency / factor for frequency in frequencies]
    elif kind == "llama3":
        frequencies = [_llama3(frequency, scaling) for frequency in frequencies]
    elif kind != "default":
        raise _unsupported(scaling.name(kind_key), kind, ("default", "linear", "llama3"))
    return _rope(head_dim, RopeStyle.HALVES, frequencies)


def _frequencies(name: str, theta: float, rotated: int) -> list[float]:
    if theta < 1:
        raise ModelFileError(f"{name} is {theta}; expected a number of at least 1")
    if rotated % 2:
        raise ModelFileError(f"RoPE rotates {rotated} elements of each head; expected an even number")
    return [theta ** (-2.0 * pair / rotated) for pair in range(rotated // 2)]


def _rope(head_dim: int, style: RopeStyle, frequencies: Sequence[float]) -> Rope:
    if not 0 < len(frequencies) <= head_dim // 2:
        raise ModelFileError(f"RoPE rotates {2 * len(frequencies)} elements of each head, which has {head_dim}")
    if not all(math.isfinite(frequency) for frequency in frequencies):
        raise ModelFileError("RoPE scaling gives frequencies that are not finite; the scaling factors are wrong")
    return Rope(head_dim=head_dim, style=style, inverse_frequencies=tuple(frequencies))


def _llama3(frequency: float, scaling: Fields) -> float:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended (Llama 3.1's reference code)."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise ModelFileError(f"{scaling.name('high_freq_factor')} is {high}; expected more than low_freq_factor, {low}")
    turns = scaling.size("original_max_position_embeddings") * frequency / (2 * math.pi)
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return kept * frequency + (1.0 - kept) * frequency / scaling.number("factor")


def _factors(tensor: RawTensor, count: int) -> list[float]:
    if tensor.format is not Format.F32 or tensor.shape != (count,):
        raise ModelFileError(f"tensor {tensor.name} is {tensor.format} {tensor.shape}; expected f32 {(count,)}")
    factors: list[float] = np.frombuffer(tensor.data, dtype="<f4").astype(np.float64).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelFileError(f"tensor {tensor.name} holds a factor that is not a positive number")
    return factors


def _unsupported(name: str, kind: str, supported: tuple[str, ...]) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} {kind[:40]!r} is not implemented; octavo has {', '.join(supported)}")
