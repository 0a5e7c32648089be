"""The cpu backend: choice of build and threads, dtypes, refusals, life cycle. Values and bits are in tests/contract."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import Batch, DType, KVDType
from octavo.backends.cpu import _native
from octavo.backends.cpu.backend import CpuBackend, CpuModel
from octavo.backends.cpu.build import available_isas, chosen_isa
from octavo.contracts import KVGroup, KVLayout
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.ops import Attention
from octavo.quant import Format, RawTensor
from support.tiny_models import raw_tensor

VOCAB, HIDDEN = 50, 64
ATTENTION = Attention(layer=0, num_heads=2, num_kv_heads=1, head_dim=32, scale=0.2)


def forward(ops: Any, weights: Any, inputs: Any) -> Any:
    x = ops.norm(ops.embed(weights["embed"], inputs.tokens), weights["norm"], 1e-5)
    k = ops.linear(x, weights["k"])
    ops.kv_write(ATTENTION, k, k)
    x = ops.add(x, ops.attention(ATTENTION, ops.linear(x, weights["q"])))
    return ops.head(ops.select(x, inputs.logit_rows), weights["embed"])


def tensors(form: Format = Format.Q8_0, **changes: RawTensor) -> dict[str, RawTensor]:
    random = np.random.default_rng(0)
    shapes = {"embed": (VOCAB, HIDDEN), "q": (64, HIDDEN), "k": (32, HIDDEN)}
    result = {name: raw_tensor(name, random.normal(0, 0.3, shape), form) for name, shape in shapes.items()}
    return result | {"norm": raw_tensor("norm", np.ones(HIDDEN), Format.F16)} | changes


def load(dtype: DType = "auto", form: Format = Format.Q8_0, **options: Any) -> CpuModel:
    model = CpuBackend(**{"threads": 1, **options}).load(forward, tensors(form), dtype=dtype)
    assert isinstance(model, CpuModel)
    layout = KVLayout(block_size=16, groups=(KVGroup(layers=(0,), num_kv_heads=1, head_dim=32),), num_blocks=(4,))
    model.allocate_kv(layout)
    return model


def batch(token_ids: list[int], **changes: Any) -> Batch:
    i32 = lambda values: np.array(values, np.int32)  # noqa: E731
    arrays: dict[str, Any] = {
        "tokens": i32(token_ids),
        "positions": i32(range(len(token_ids))),
        "row_starts": i32([0, len(token_ids)]),
        "tables": (i32([[2, 0, 3, 1]]),),
        "logit_rows": i32(range(len(token_ids))),
    }
    return Batch(**arrays | changes)


@pytest.fixture
def isa_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    yield monkeypatch


def test_octavo_isa_forces_a_build(isa_variable: pytest.MonkeyPatch) -> None:
    assert available_isas()[0] == "portable"
    assert chosen_isa() == available_isas()[-1]
    expected = load().forward(batch([1, 2, 3])).copy()
    for isa in available_isas():
        isa_variable.setenv("OCTAVO_ISA", isa)
        model = load()
        assert model._isa == isa
        np.testing.assert_array_equal(model.forward(batch([1, 2, 3])), expected, strict=True)


def test_an_unknown_isa_is_refused_by_name(isa_variable: pytest.MonkeyPatch) -> None:
    isa_variable.setenv("OCTAVO_ISA", "avx1024")
    with pytest.raises(ConfigError, match=r"avx1024.*available: portable") as error:
        CpuBackend()
    assert error.value.param == "OCTAVO_ISA"


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_threads_out_of_range_are_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match="threads"):
        CpuBackend(threads=threads)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("form", list(Format))
def test_threads_and_chunks_do_not_change_bits(dtype: DType, form: Format) -> None:
    tokens = list(range(1, 40))
    expected = load(dtype, form).forward(batch(tokens)).copy()
    assert np.isfinite(expected).all()
    assert np.ptp(expected) > 1
    model = load(dtype, form, threads=3)
    np.testing.assert_array_equal(model.forward(batch(tokens)), expected, strict=True)
    for position, token in enumerate(tokens):
        logits = model.forward(batch([token], positions=np.array([position], np.int32)))
        np.testing.assert_array_equal(logits[0], expected[position], strict=True)


def test_work_is_counted() -> None:
    model = load()
    model.forward(batch([1, 2, 3], logit_rows=np.array([2], np.int32)))
    work = model.last_work
    assert work.forward_s > 0
    assert work.weight_bytes == model.weight_bytes - 4 * HIDDEN  # all but the norm
    assert work.kv_bytes == 3 * 2 * 32 * 2
    projections, head, attention = 2 * (32 + 64) * HIDDEN, 2 * VOCAB * HIDDEN, 4 * 2 * 32
    assert work.ops == 3 * projections + head + (1 + 2 + 3) * attention
    model.forward(
        batch(
            [4, 5],
            positions=np.array([3, 0], np.int32),
            row_starts=np.array([0, 1, 2], np.int32),
            tables=(np.array([[2], [0]], np.int32),),
            logit_rows=np.array([], np.int32),
        )
    )
    assert model.last_work.kv_bytes == (4 + 1) * 2 * 32 * 2
    assert model.last_work.ops == 2 * projections + (4 + 1) * attention
    assert model.last_work.weight_bytes < work.weight_bytes


def test_steps_are_worth_parts_of_more_tokens_where_more_threads_share_the_memory() -> None:
    assert [load(threads=threads).least_part for threads in (1, 2, 4)] == [8, 16, 32]


def test_dtypes() -> None:
    assert load("auto").arithmetic == load("bfloat16").arithmetic == "cpu-2-kv-bfloat16"
    assert load("auto").bytes_per_kv_value == 2
    assert load("float32").arithmetic == "cpu-2-kv-float32"
    assert load("float32").bytes_per_kv_value == 4
    assert load("float32", Format.F32).weight_bytes > 1.9 * load("auto", Format.F32).weight_bytes
    assert load("float32", Format.Q8_0).weight_bytes == load("auto", Format.Q8_0).weight_bytes
    with pytest.raises(ConfigError, match=r"float16.*bfloat16"):
        load("float16")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "held", "bytes_of_a_head"),
    [
        ("auto", "auto", "bfloat16", 64),
        ("auto", "int8", "int8", 36),
        ("float32", "int8", "int8", 36),
        ("float32", "bfloat16", "bfloat16", 64),
        ("float32", "auto", "float32", 128),
    ],
)
def test_kv_cache_formats(dtype: DType, kv_dtype: KVDType, held: str, bytes_of_a_head: int) -> None:
    model = CpuBackend(threads=1).load(forward, tensors(Format.Q8_0), dtype=dtype, kv_dtype=kv_dtype)
    assert model.arithmetic == f"cpu-2-kv-{held}"
    assert 32 * model.bytes_per_kv_value + model.bytes_per_kv_scale == bytes_of_a_head
    cache = _native.KvStore(held, 16, [([0, 1], 4096, 2, 32, 0)])
    assert cache.reserved_bytes == 2 * 4096 * 2 * 16 * 2 * bytes_of_a_head
    with pytest.raises(ValueError, match=r"fp8.*bfloat16 and int8"):
        _native.KvStore("fp8", 16, [([0], 3, 2, 32, 0)])


def test_unsupported_tensors_are_refused_by_name() -> None:
    backend = CpuBackend(threads=1)
    ones = np.ones((32, HIDDEN))
    for change, message in (
        ({"norm": raw_tensor("norm", np.ones(HIDDEN), Format.Q8_0)}, "norm has format Q8_0"),
        ({"k": raw_tensor("k", ones[np.newaxis], Format.F32)}, r"k has format F32 and shape \[1, 32, 64\]"),
        ({"k": raw_tensor("k", ones[:, :32], Format.F32)}, "cannot run this model: .*32 columns"),
        ({"k": raw_tensor("k", ones[:24], Format.F32)}, "cannot run this model: attention heads of 24|24 columns"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            backend.load(forward, tensors(**change), dtype="auto")


def test_progress_ends_at_the_total() -> None:
    calls: list[tuple[int, int]] = []
    CpuBackend(threads=1).load(
        forward, tensors(), dtype="auto", progress=lambda done, total: calls.append((done, total))
    )
    total = sum(tensor.data.nbytes for tensor in tensors().values())
    assert len(calls) == 4
    assert calls[-1] == (total, total)


def test_wrong_batches_are_refused() -> None:
    model = load()
    for wrong, error in (
        (batch([VOCAB]), ValueError),
        (batch([1], tables=(np.full((1, 4), 4, np.int32),)), ValueError),
        (batch([1], tables=(np.zeros((2, 4), np.int32),)), ValueError),
        (batch([1], tables=()), ValueError),
        (batch([1], tokens=np.array([1], np.int64)), TypeError),
        (batch([1], tokens=np.array([[1]], np.int32)), TypeError),
        (batch([1, 2], tokens=np.arange(4, dtype=np.int32)[::2]), TypeError),
    ):
        with pytest.raises(error):
            model.forward(wrong)
    assert np.isfinite(model.forward(batch([1]))).all()


def test_no_logits_wanted() -> None:
    assert load().forward(batch([1, 2], logit_rows=np.zeros(0, np.int32))).shape == (0, VOCAB)


def test_close_frees_threads_and_is_idempotent() -> None:
    def helpers() -> int:
        tasks = Path("/proc/self/task").iterdir()
        return sum((task / "comm").read_text().startswith("octavo-") for task in tasks)

    before = helpers()
    model = load(threads=4)
    assert helpers() == before + 3
    logits = model.forward(batch([1]))
    model.close()
    model.close()
    assert helpers() == before
    assert np.isfinite(logits).all()  # the array keeps its memory
    with pytest.raises(RuntimeError, match="closed"):
        model.forward(batch([1]))


def test_forward_releases_the_gil() -> None:
    model = load()
    done = threading.Event()
    worker = threading.Thread(target=lambda: (model.forward(batch(list(range(40)))), done.set()))
    worker.start()
    assert done.wait(10)
    worker.join()


def test_a_portable_process_needs_no_special_cpu() -> None:
    """A fresh process, so that nothing was chosen before the variable was set."""
    code = "from octavo.backends.cpu.build import chosen_isa; print(chosen_isa())"
    environment = os.environ | {"OCTAVO_ISA": "portable"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "portable"
