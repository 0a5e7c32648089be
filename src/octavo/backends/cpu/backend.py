"""The native backend behind `octavo.backends.base`: weights are packed at load, the forward is recorded and then replayed.

Quantized matrices stay as stored and are multiplied with 8-bit activations, one scale per 32. Other matrices are bfloat16 with
activations rounded to bfloat16, or float32 with dtype float32. Norms, biases, the residual stream and all sums are float32. K and V
are bfloat16, float32 with dtype float32, or int8 on request. A row's bits depend on nothing but the row: see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from octavo.backends.base import (
    F32,
    I32,
    KV_BYTES,
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
from octavo.backends.cpu import _native
from octavo.backends.cpu.build import chosen_isa
from octavo.backends.cpu.recorder import CpuWeight, record
from octavo.backends.cpu.sampler import CpuSampler
from octavo.contracts import ForwardWork, KVLayout
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.obs.machine import cpu_count
from octavo.quant import RawTensor, dequantize

ARITHMETIC_VERSION = 2
"""Part of the name of everything that was computed: raised when any bit of a result may change."""

_MOST_THREADS = 1024

_LEAST_PART_PER_THREAD = 8
"""Tokens for each thread from which on products, not reading weights, take most of a forward: measured with two."""


class CpuBackend:
    """`Backend` in C++. `threads` counts all threads that compute, None takes the CPUs this process may use.

    `isa` and `fuse` are for tests: None takes the instruction set of OCTAVO_ISA, else the fastest; without `fuse` the program runs
    as it was recorded. Raises ConfigError for threads outside 1..1024 or an OCTAVO_ISA that cannot run here.
    """

    name = "cpu"

    def __init__(self, *, threads: int | None = None, isa: str | None = None, fuse: bool = True) -> None:
        self._threads = min(cpu_count(), _MOST_THREADS) if threads is None else threads
        if not 1 <= self._threads <= _MOST_THREADS:
            raise ConfigError(f"threads must be in 1..{_MOST_THREADS}, got {threads}", param="threads")
        self._isa = chosen_isa() if isa is None else isa
        self._fuse = fuse

    def load(
        self,
        forward: Forward,
        tensors: Mapping[str, RawTensor],
        *,
        dtype: DType,
        kv_dtype: KVDType = "auto",
        progress: Progress | None = None,
    ) -> BackendModel:
        """Records the forward, then packs all tensors.

        Raises ConfigError for float16, and UnsupportedModelError for shapes and sizes that the kernels do not have, before memory is
        taken; ConfigError when there is no memory.
        """
        if dtype == "float16":
            raise ConfigError(
                "the cpu backend has no float16; use --dtype bfloat16 (or auto), or float32 for full precision",
                param="dtype",
            )
        float32 = dtype == "float32"
        native = _native.Weights()
        weights = {name: _declare(native, tensor, float32=float32) for name, tensor in tensors.items()}
        try:
            program = record(forward, weights, native, self._isa, fuse=self._fuse)
        except ValueError as error:
            raise UnsupportedModelError(f"the cpu backend cannot run this model: {error}") from error
        try:
            native.allocate()
        except MemoryError as error:
            raise ConfigError(f"no memory for {native.bytes} bytes of weights; use a smaller model") from error
        pool = _native.Pool(self._threads)
        total = sum(tensor.data.nbytes for tensor in tensors.values())
        done = 0
        for name, tensor in tensors.items():
            _fill(native, pool, weights[name], tensor)
            done += tensor.data.nbytes
            if progress is not None:
                progress(done, total)
        kv_format: KVFormat = kv_dtype if kv_dtype != "auto" else "float32" if float32 else "bfloat16"
        return CpuModel(program, pool, weight_bytes=native.bytes, kv_format=kv_format)


def _declare(native: _native.Weights, tensor: RawTensor, *, float32: bool) -> CpuWeight:
    try:
        match tensor.shape:
            case (n, k):
                return CpuWeight((n, k), native.declare_matrix(tensor.format.value, float32, n, k))
            case (n,) if not tensor.format.quantized:
                return CpuWeight((n,), native.declare_vector(n))
    except ValueError as error:
        raise UnsupportedModelError(f"tensor {tensor.name}: {error}", param=tensor.name) from error
    raise UnsupportedModelError(
        f"tensor {tensor.name} has format {tensor.format.name} and shape {list(tensor.shape)}; the cpu backend has matrices of all "
        "formats and vectors of F32, F16 and BF16",
        param=tensor.name,
    )


def _fill(native: _native.Weights, pool: _native.Pool, weight: CpuWeight, tensor: RawTensor) -> None:
    if len(weight.shape) == 2:
        native.fill_matrix(pool, weight.index, np.ascontiguousarray(tensor.data, np.uint8))
    else:
        native.fill_vector(weight.index, dequantize(tensor))


class CpuModel:
    """`BackendModel` of the cpu backend. Owns weights, cache and threads through its native objects."""

    def __init__(self, program: _native.Program, pool: _native.Pool, *, weight_bytes: int, kv_format: KVFormat) -> None:
        self._program: _native.Program | None = program
        self._pool: _native.Pool | None = pool
        self._cache: _native.KvStore | None = None
        self._vocab_size = program.vocab
        self._least_part = _LEAST_PART_PER_THREAD * pool.threads
        self._isa = program.isa
        self._weight_bytes = weight_bytes
        self._kv_format: KVFormat = kv_format
        self._work = ForwardWork(forward_s=0.0, weight_bytes=0, kv_bytes=0, ops=0)

    @property
    def bytes_per_kv_value(self) -> float:
        """4 for float32, 2 for bfloat16, 1 for int8."""
        return float(KV_BYTES[self._kv_format][0])

    @property
    def bytes_per_kv_scale(self) -> int:
        """4 for int8."""
        return KV_BYTES[self._kv_format][1]

    @property
    def weight_bytes(self) -> int:
        """Packed matrices and vectors."""
        return self._weight_bytes

    @property
    def arithmetic(self) -> str:
        """Version and KV format; instruction sets and threads do not change bits."""
        return f"cpu-{ARITHMETIC_VERSION}-kv-{self._kv_format}"

    @property
    def least_part(self) -> int:
        """See `BackendModel`. Threads share the memory that weights come from, but each multiplies by itself."""
        return self._least_part

    def allocate_kv(self, layout: KVLayout) -> None:
        """Reserves the cache. Raises ConfigError when its address space cannot be had."""
        groups = [
            (list(group.layers), num_blocks, group.num_kv_heads, group.head_dim, group.window or 0)
            for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
        ]
        try:
            self._cache = _native.KvStore(self._kv_format, layout.block_size, groups)
        except MemoryError as error:
            raise ConfigError("no memory for the KV cache; lower --kv-cache-memory or --max-model-len") from error
        self._open().bind(self._cache)

    def copy_blocks(self, group: int, sources: I32, targets: I32) -> None:
        """See `BackendModel`. Raises ValueError for a block that is not there."""
        self._blocks().copy_blocks(group, sources, targets)

    def read_blocks(self, group: int, blocks: I32) -> U8:
        """See `BackendModel`: layer by layer, as `KvCache` in native/kernels/kernels.h says. Raises as `copy_blocks`."""
        return self._blocks().read_blocks(group, blocks)

    def write_blocks(self, group: int, blocks: I32, content: U8) -> None:
        """See `BackendModel`. Raises ValueError also for content of another size."""
        self._blocks().write_blocks(group, blocks, content)

    def _blocks(self) -> _native.KvStore:
        if self._cache is None:
            raise RuntimeError("the model has no KV cache")
        return self._cache

    def forward(self, batch: Batch) -> F32:
        """See `BackendModel`. Raises ValueError for a batch that does not fit the model or the cache."""
        program, pool = self._open(), self._pool
        assert pool is not None
        logits = program.run(
            pool, batch.tokens, batch.positions, batch.row_starts, list(batch.tables), batch.logit_rows
        )
        self._work = ForwardWork(*program.work)
        return logits

    def decode(self, sampler: Sampler, batch: Batch, slots: Sequence[int], most: int) -> list[list[Sampled]]:
        """See `BackendModel`: one native call. Raises ValueError as `forward` and `Sampler.sample` do."""
        program, pool = self._open(), self._pool
        assert pool is not None and isinstance(sampler, CpuSampler)
        steps, work = sampler.decode(program, pool, batch, slots, most)
        self._work = ForwardWork(*work)
        return steps

    @property
    def last_work(self) -> ForwardWork:
        """Counted natively, with the batch."""
        return self._work

    def make_sampler(self, max_num_seqs: int) -> Sampler:
        """A native sampler of the same instruction set. It shares the threads, and keeps them while it lives."""
        return CpuSampler(max_num_seqs, self._vocab_size, isa=self._isa, pool=self._pool)

    def close(self) -> None:
        """Drops program, weights, cache and threads. Idempotent."""
        self._program = None
        self._pool = None
        self._cache = None

    def _open(self) -> _native.Program:
        if self._program is None:
            raise RuntimeError("the model has been closed")
        return self._program
