"""The reference backend: every op and format in float32 numpy, written to be read.

It defines what the native backend must compute. Weights are dequantized to float32 once, at load: four bytes per weight,
whatever the file holds (SmolLM2-135M: 540 MB). K and V are float32. Products go through BLAS, whose order of summation
depends on the shapes, so equal bits across batch sizes are not promised here as they are by the cpu backend; values
agree to about 1e-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.backends.base import (
    F32,
    I32,
    U8,
    BackendModel,
    Batch,
    DType,
    Forward,
    KVDType,
    KVFormat,
    Progress,
    Sampled,
    Sampler,
)
from octavo.backends.numpy.sampler import NumpySampler
from octavo.contracts import KVLayout
from octavo.errors import ConfigError
from octavo.ops import Activation, Attention, Rope, RopeStyle, Weight
from octavo.quant import Format, RawTensor, dequantize, quantize

ARITHMETIC_VERSION = 1
_SMALLEST_ABSMAX = np.float32(2.0**-100)


class NumpyBackend:
    """`Backend` in numpy, with dtype float32 (also `auto`) or bfloat16.

    With bfloat16, unquantized matrices, the inputs of products with them, and K and V are rounded to bfloat16; products
    and sums stay float32. K and V are rounded to bfloat16 or to 8 bits also where `kv_dtype` says so.
    """

    name = "numpy"

    def load(
        self,
        forward: Forward,
        tensors: Mapping[str, RawTensor],
        *,
        dtype: DType,
        kv_dtype: KVDType = "auto",
        progress: Progress | None = None,
    ) -> BackendModel:
        """Dequantizes all tensors. Raises ConfigError for float16."""
        if dtype == "float16":
            raise ConfigError("the numpy backend has no float16; use --dtype float32 or bfloat16", param="dtype")
        rounded = dtype == "bfloat16"
        total = sum(tensor.data.nbytes for tensor in tensors.values())
        done = 0
        weights: dict[str, Weight] = {}
        for name, tensor in tensors.items():
            weights[name] = _weight(tensor, rounded=rounded)
            done += tensor.data.nbytes
            if progress is not None:
                progress(done, total)
        kv_format: KVFormat = kv_dtype if kv_dtype != "auto" else "bfloat16" if rounded else "float32"
        return NumpyModel(forward, weights, kv_format=kv_format)


class NumpyWeight(msgspec.Struct, frozen=True):
    """A weight as float32. `rounds_input`: its products take bfloat16 inputs."""

    values: F32
    rounds_input: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] for matrices."""
        return self.values.shape


def _weight(tensor: RawTensor, *, rounded: bool) -> NumpyWeight:
    values = dequantize(tensor)
    rounds = rounded and len(tensor.shape) == 2 and not tensor.format.quantized
    return NumpyWeight(values=round_to_bf16(values) if rounds else values, rounds_input=rounds)


def round_to_bf16(values: F32) -> F32:
    """The nearest bfloat16 values (ties to even), as float32."""
    return dequantize(RawTensor(name="", shape=values.shape, format=Format.BF16, data=quantize(values, Format.BF16)))


def round_to_int8(values: F32, head_dim: int) -> F32:
    """What an int8 KV cache holds of K or V [n, heads * head_dim]: see `KVFormat`."""
    heads = values.reshape(-1, head_dim)
    absmax = np.abs(heads).max(axis=1, keepdims=True)
    absmax[absmax < _SMALLEST_ABSMAX] = np.inf  # all levels are then zero
    levels = np.rint(heads * (np.float32(127) / absmax))
    scales = np.where(np.isinf(absmax), np.float32(0), absmax / np.float32(127))
    rounded: F32 = (levels * scales).reshape(values.shape)
    return rounded


class NumpyModel:
    """`BackendModel` of the numpy backend: owns weights and KV cache."""

    def __init__(self, forward: Forward, weights: Mapping[str, Weight], *, kv_format: KVFormat) -> None:
        self._forward = forward
        self._weights = weights
        self._kv_format: KVFormat = kv_format
        self._layers: tuple[tuple[int, ...], ...] = ()
        self._caches: dict[int, _LayerCache] = {}

    @property
    def bytes_per_kv_value(self) -> float:
        """K and V are kept as float32, also when rounded."""
        return 4.0

    @property
    def bytes_per_kv_scale(self) -> int:
        """Scales are not kept."""
        return 0

    @property
    def weight_bytes(self) -> int:
        """All weights, as float32."""
        return sum(weight.values.nbytes for weight in self._weights.values() if isinstance(weight, NumpyWeight))

    @property
    def arithmetic(self) -> str:
        """Version and KV format."""
        return f"numpy-{ARITHMETIC_VERSION}-kv-{self._kv_format}"

    @property
    def least_part(self) -> int:
        """See `BackendModel`."""
        return 16

    def allocate_kv(self, layout: KVLayout) -> None:
        """Zeroed arrays, whose pages the system commits on first write."""
        self._layers = tuple(kv_group.layers for kv_group in layout.groups)
        self._caches = {
            layer: _LayerCache(layout, group, kv_heads=kv_group.num_kv_heads, head_dim=kv_group.head_dim)
            for group, kv_group in enumerate(layout.groups)
            for layer in kv_group.layers
        }

    def copy_blocks(self, group: int, sources: I32, targets: I32) -> None:
        """See `BackendModel`."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for layer in self._layers[group]:
                self._caches[layer].blocks[:, target] = self._caches[layer].blocks[:, source]

    def read_blocks(self, group: int, blocks: I32) -> U8:
        """See `BackendModel`: float32 [layers, K and V, block_size, kv_heads, head_dim] of each block."""
        content = np.stack([self._caches[layer].blocks[:, blocks].swapaxes(0, 1) for layer in self._layers[group]], 1)
        return content.view(np.uint8).reshape(len(blocks), -1)

    def write_blocks(self, group: int, blocks: I32, content: U8) -> None:
        """See `BackendModel`. Raises ValueError for content of another size."""
        layers = self._layers[group]
        _, _, *shape = self._caches[layers[0]].blocks.shape
        values = content.view(np.float32).reshape(len(blocks), len(layers), 2, *shape)
        for number, layer in enumerate(layers):
            self._caches[layer].blocks[:, blocks] = values[:, number].swapaxes(0, 1)

    def forward(self, batch: Batch) -> F32:
        """See `BackendModel`. The result is a new array."""
        ops = NumpyOps(batch, self._caches, kv_format=self._kv_format)
        logits: F32 = self._forward(ops, self._weights, _Inputs(batch.tokens, batch.logit_rows))
        return logits

    def decode(self, sampler: Sampler, batch: Batch, slots: Sequence[int], most: int) -> list[list[Sampled]]:
        """See `BackendModel`."""
        assert isinstance(sampler, NumpySampler)
        return decode_step_by_step(self, sampler, batch, slots, most)

    @property
    def last_work(self) -> None:
        """Not counted."""
        return

    def make_sampler(self, max_num_seqs: int) -> Sampler:
        """The numpy sampler, over as many tokens as the embedding has rows."""
        return NumpySampler(max_num_seqs, self._weights["embed"].shape[0])

    def close(self) -> None:
        """Drops weights and cache."""
        self._weights = {}
        self._caches = {}


def decode_step_by_step(
    model: BackendModel, sampler: NumpySampler, batch: Batch, slots: Sequence[int], most: int
) -> list[list[Sampled]]:
    """`BackendModel.decode` in terms of a forward and a sampler."""
    steps: list[list[Sampled]] = []
    while len(steps) < most:
        sampled = sampler.sample(model.forward(batch), slots, (batch.positions + 1).tolist())
        steps.append(sampled)
        if any(row.error or sampler.ends(slot, row.token) for slot, row in zip(slots, sampled, strict=True)):
            break
        tokens = np.array([row.token for row in sampled], np.int32)
        batch = msgspec.structs.replace(batch, tokens=tokens, positions=batch.positions + 1)
    return steps


class _Inputs(msgspec.Struct, frozen=True):
    tokens: I32
    logit_rows: I32


class _LayerCache:
    """K and V of one layer: `blocks` [2, num_blocks, block_size, kv_heads, head_dim], addressed through block tables."""

    def __init__(self, layout: KVLayout, group: int, *, kv_heads: int, head_dim: int) -> None:
        self.group = group
        self.block_size = layout.block_size
        self.blocks: F32 = np.zeros((2, layout.num_blocks[group], layout.block_size, kv_heads, head_dim), np.float32)

    def write(self, table: I32, positions: I32, k: F32, v: F32) -> None:
        """Stores k and v [n, kv_heads, head_dim] at the positions of one row."""
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        self.blocks[0, blocks, offsets] = k
        self.blocks[1, blocks, offsets] = v

    def read(self, table: I32, start: int, stop: int) -> tuple[F32, F32]:
        """K and V [kv_heads, stop - start, head_dim] of positions start..stop-1 of one row."""
        positions = np.arange(start, stop)
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        return self.blocks[0, blocks, offsets].swapaxes(0, 1), self.blocks[1, blocks, offsets].swapaxes(0, 1)


class NumpyOps:
    """`Ops` for one step: arrays are float32 [rows, columns]."""

    def __init__(self, batch: Batch, caches: Mapping[int, _LayerCache], *, kv_format: KVFormat) -> None:
        self._batch = batch
        self._caches = caches
        self._kv_format: KVFormat = kv_format
        self._rotations: dict[Rope, tuple[F32, F32]] = {}

    def embed(self, table: Any, tokens: I32) -> F32:
        """Rows of the dequantized table."""
        embedded: F32 = table.values[tokens]
        return embedded

    def norm(self, x: F32, weight: Any, eps: float) -> F32:
        """x / sqrt(mean(x^2) + eps) * weight."""
        mean_square = np.mean(x * x, axis=1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + np.float32(eps)) * weight.values
        return normed

    def linear(self, x: F32, weight: Any, bias: Any = None) -> F32:
        """x weight^T + bias."""
        inputs = round_to_bf16(x) if weight.rounds_input else x
        product: F32 = inputs @ weight.values.T
        return product if bias is None else product + bias.values

    def rope(self, x: F32, rope: Rope) -> F32:
        """Rotates the pairs (a, b) of each head to (a cos - b sin, b cos + a sin); elements beyond the pairs stay."""
        cos, sin = self._rotation(rope)
        pairs = len(rope.inverse_frequencies)
        heads = x.reshape(len(x), -1, rope.head_dim)
        if rope.style is RopeStyle.HALVES:
            first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        else:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        a, b = heads[:, :, first], heads[:, :, second]
        rotated = heads.copy()
        rotated[:, :, first] = a * cos - b * sin
        rotated[:, :, second] = b * cos + a * sin
        return rotated.reshape(x.shape)

    def _rotation(self, rope: Rope) -> tuple[F32, F32]:
        """cos and sin [T, 1, pairs] of each token's angles."""
        if rope not in self._rotations:
            angles = self._batch.positions[:, np.newaxis, np.newaxis] * np.array(rope.inverse_frequencies, np.float64)
            self._rotations[rope] = (
                np.cos(angles).astype(np.float32) * np.float32(rope.magnitude),
                np.sin(angles).astype(np.float32) * np.float32(rope.magnitude),
            )
        return self._rotations[rope]

    def kv_write(self, attention: Attention, k: F32, v: F32) -> None:
        """Stores K and V, rounded to the cache's format."""
        if self._kv_format == "bfloat16":
            k, v = round_to_bf16(k), round_to_bf16(v)
        elif self._kv_format == "int8":
            k, v = round_to_int8(k, attention.head_dim), round_to_int8(v, attention.head_dim)
        cache = self._caches[attention.layer]
        shape = (-1, attention.num_kv_heads, attention.head_dim)
        for tokens, table in self._rows(cache):
            cache.write(table, self._batch.positions[tokens], k[tokens].reshape(shape), v[tokens].reshape(shape))

    def attention(self, attention: Attention, q: F32) -> F32:
        """Softmax over all positions at once, row by row of the batch."""
        cache = self._caches[attention.layer]
        out = np.empty_like(q)
        for tokens, table in self._rows(cache):
            out[tokens] = self._attend(attention, cache, table, self._batch.positions[tokens], q[tokens])
        return out

    def _attend(self, attention: Attention, cache: _LayerCache, table: I32, positions: I32, q: F32) -> F32:
        """q [n, heads * head_dim] of one row's tokens -> the same shape."""
        window = attention.window
        start = 0 if window is None else max(0, int(positions[0]) - window + 1)
        stop = int(positions[-1]) + 1
        k, v = cache.read(table, start, stop)

        group = attention.num_heads // attention.num_kv_heads
        # [kv_heads, group, n, head_dim]: the query heads of a group share a KV head.
        queries = q.reshape(-1, attention.num_kv_heads, group, attention.head_dim).transpose(1, 2, 0, 3)
        scores: F32 = np.float32(attention.scale) * (queries @ k[:, np.newaxis].swapaxes(2, 3))

        distance = positions[:, np.newaxis] - np.arange(start, stop)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        scores[..., ~visible] = -np.inf
        weights: F32 = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ v[:, np.newaxis]
        attended: F32 = mixed.transpose(2, 0, 1, 3).reshape(q.shape)
        return attended

    def _rows(self, cache: _LayerCache) -> list[tuple[slice, I32]]:
        """(its tokens, its block table) of each row of the batch."""
        starts = self._batch.row_starts.tolist()
        tables = self._batch.tables[cache.group]
        return [(slice(starts[row], starts[row + 1]), tables[row]) for row in range(len(tables))]

    def activate(self, kind: Activation, gate: F32, up: F32) -> F32:
        """silu(x) = x / (1 + exp(-x))."""
        match kind:
            case Activation.SILU:
                with np.errstate(over="ignore"):  # for a very negative x the quotient is 0, as it should be
                    activated: F32 = gate / (1 + np.exp(-gate)) * up
                return activated
            case _ as unreachable:
                assert_never(unreachable)

    def add(self, x: F32, y: F32) -> F32:
        """x + y."""
        return x + y

    def select(self, x: F32, rows: npt.NDArray[Any]) -> F32:
        """x[rows]."""
        selected: F32 = x[rows]
        return selected

    def head(self, x: F32, weight: Any) -> F32:
        """Logits."""
        return self.linear(x, weight)
