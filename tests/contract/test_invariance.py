"""Same bits whatever the load: a sequence's logits on the cpu backend do not depend on how it is computed.

Alone, in batches of 2 to 17, in other orders, in chunks, with other block sizes, on more threads; across instruction sets too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from octavo.backends.base import BackendModel, DType, KVDType
from octavo.backends.cpu.backend import CpuBackend
from octavo.loaders.checkpoint import open_gguf
from octavo.models import ModelSpec, make_forward
from octavo.quant import Format
from octavo.runner.load import load_model
from support.backends import ISAS
from support.driver import layout_for, run
from support.tiny_models import random_tensors, tiny_spec

F32 = npt.NDArray[np.float32]
Load = Callable[[int, str | None], tuple[ModelSpec, BackendModel]]
"""(threads, isa) -> spec and model."""

TINY = tiny_spec(windows=(None, 40), qkv_bias=True)
TINY_LENGTHS = (300, 1, 2, 17, 64, 65, 128, 31, 7, 33, 90, 5, 256, 16, 15, 100, 8)


def tiny(form: Format, dtype: DType, kv_dtype: KVDType = "auto") -> Load:
    def load(threads: int, isa: str | None) -> tuple[ModelSpec, BackendModel]:
        backend = CpuBackend(threads=threads, isa=isa)
        return TINY, backend.load(make_forward(TINY), random_tensors(TINY, form), dtype=dtype, kv_dtype=kv_dtype)

    return load


CASES = {
    "q4_1": (tiny(Format.Q4_1, "auto"), ISAS),
    "q8_0": (tiny(Format.Q8_0, "float32"), ISAS),
    "q4_0": (tiny(Format.Q4_0, "auto"), ISAS),
    "bfloat16": (tiny(Format.BF16, "bfloat16"), ISAS),
    "float32": (tiny(Format.F32, "float32"), ISAS),
    "int8 cache": (tiny(Format.Q8_0, "auto", "int8"), ISAS),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Load, Sequence[str]]:
    return CASES[request.param]


def sequences_of(spec: ModelSpec, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths]


class Runs:
    """Runs sequences on a fresh model for each block size, number of threads and instruction set."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._models: dict[tuple[int, int, str | None], tuple[ModelSpec, BackendModel]] = {}

    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        chunk: int | None = None,
        block_size: int = 16,
        threads: int = 1,
        isa: str | None = None,
        seed: int = 0,
    ) -> list[F32]:
        key = (block_size, threads, isa)
        if key not in self._models:
            spec, model = self._load(threads, isa)
            model.allocate_kv(layout_for(spec, block_size=block_size, num_tokens=4096))
            self._models[key] = (spec, model)
        spec, model = self._models[key]
        layout = layout_for(spec, block_size=block_size, num_tokens=4096)
        return run(model, layout, sequences, chunk=chunk, seed=seed)

    def close(self) -> None:
        for _, model in self._models.values():
            model.close()


@pytest.fixture
def runs(case: tuple[Load, Sequence[str]]) -> Iterator[Runs]:
    made = Runs(case[0])
    yield made
    made.close()


def assert_same(got: Sequence[F32], expected: Sequence[F32], what: str) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        differing = np.flatnonzero((one.view(np.uint32) != other.view(np.uint32)).any(axis=1))
        assert not len(differing), f"{what}: sequence {index} differs first at position {differing[0]}"


def test_load_does_not_change_bits(runs: Runs) -> None:
    sequences = sequences_of(TINY, TINY_LENGTHS)
    alone = [runs([tokens])[0] for tokens in sequences]
    assert all(np.isfinite(logits).all() for logits in alone)
    assert np.ptp(alone[0]) > 1, "logits that are all alike would prove nothing"
    for size in range(2, 18):
        assert_same(runs(sequences[:size], chunk=64, seed=size), alone[:size], f"in a batch of {size}")
    assert_same(runs(sequences[::-1]), alone[::-1], "in the opposite order")
    for chunk in (1, 7, 64):
        assert_same(runs(sequences, chunk=chunk), alone, f"in chunks of {chunk}")
        assert_same(runs(sequences[:1], chunk=chunk), alone[:1], f"alone in chunks of {chunk}")
    for block_size in (8, 32):
        assert_same(runs(sequences, block_size=block_size, chunk=64), alone, f"in blocks of {block_size}")
    for threads in (2, 3):
        assert_same(runs(sequences, threads=threads), alone, f"on {threads} threads")
        assert_same(runs(sequences, threads=threads, chunk=1), alone, f"on {threads} threads, token by token")


def test_instruction_sets_agree(case: tuple[Load, Sequence[str]]) -> None:
    load, isas = case
    runs = Runs(load)
    sequences = sequences_of(TINY, TINY_LENGTHS)
    portable = runs(sequences, isa=isas[0])
    for isa in isas[1:]:
        assert_same(runs(sequences, isa=isa), portable, isa)
        assert_same(runs(sequences, isa=isa, chunk=1), portable, f"{isa}, token by token")
    runs.close()


@pytest.mark.timeout(600)
def test_smollm2(smollm2: Path) -> None:
    """The same on the real model, with fewer and shorter sequences."""
    checkpoint = open_gguf(smollm2, name="smollm2-135m")

    def load(threads: int, isa: str | None) -> tuple[ModelSpec, BackendModel]:
        loaded = load_model(checkpoint, CpuBackend(threads=threads, isa=isa))
        return loaded.spec, loaded.model

    runs = Runs(load)
    lengths = (70, 1, 2, 17, 33, 5, 16, 15, 8, 7, 6, 5, 4, 3, 2, 9, 10)
    spec, model = load(1, None)
    model.close()
    sequences = sequences_of(spec, lengths)
    alone = [runs([tokens])[0] for tokens in sequences]
    for size in (2, 3, 5, 8, 17):
        assert_same(runs(sequences[:size], seed=size), alone[:size], f"in a batch of {size}")
    assert_same(runs(sequences[::-1]), alone[::-1], "in the opposite order")
    for chunk in (1, 7, 64):
        assert_same(runs(sequences, chunk=chunk), alone, f"in chunks of {chunk}")
    assert_same(runs(sequences, block_size=8), alone, "in blocks of 8")
    assert_same(runs(sequences, threads=2), alone, "on 2 threads")
    for isa in ISAS:
        assert_same(runs(sequences[:3], isa=isa), alone[:3], isa)
    runs.close()
