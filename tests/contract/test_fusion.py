"""Fusion moves instructions and changes none: a fused program gives the bits of the recorded one, at any number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import BackendModel, DType
from octavo.backends.cpu.backend import CpuBackend
from octavo.models import make_forward
from octavo.quant import Format
from support.backends import ISAS
from support.driver import layout_for, run
from support.tiny_models import random_tensors, tiny_spec

# Both with and without what keeps gate and up apart or the norm in a phase of its own; 96 columns leave a tile half full.
SPECS = {
    "plain": tiny_spec(),
    "biases and windows": tiny_spec(windows=(None, 40), qkv_bias=True),
}
CASES: dict[str, tuple[Format, DType]] = {
    "q4_1": (Format.Q4_1, "auto"),
    "q4_0": (Format.Q4_0, "auto"),
    "q8_0": (Format.Q8_0, "float32"),
    "bfloat16": (Format.BF16, "bfloat16"),
    "float32": (Format.F32, "float32"),
}
ROWS = {
    "1": ([1], None),
    "7": ([7], None),
    "64": ([64], None),
    "more than one tile of queries": ([300], None),
    "1 at a time": ([20], 1),
    "mixed": ([64, 1, 7, 33, 2, 100], 16),
}


@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isa", ISAS)
def test_fused_equals_unfused(spec_name: str, case: str, isa: str) -> None:
    spec, (form, dtype) = SPECS[spec_name], CASES[case]

    def load(*, fuse: bool, threads: int) -> BackendModel:
        backend = CpuBackend(threads=threads, isa=isa, fuse=fuse)
        model = backend.load(make_forward(spec), random_tensors(spec, form), dtype=dtype)
        model.allocate_kv(layout_for(spec))
        return model

    plain, fused, shared = load(fuse=False, threads=1), load(fuse=True, threads=1), load(fuse=True, threads=3)
    rng = np.random.default_rng(3)
    for name, (lengths, chunk) in ROWS.items():
        sequences = [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths]
        expected = run(plain, layout_for(spec), sequences, chunk=chunk)
        assert np.ptp(expected[0]) > 1, "logits that are all alike would prove nothing"
        for model in (fused, shared):
            got = run(model, layout_for(spec), sequences, chunk=chunk)
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32), err_msg=f"{name} rows")
    for model in (plain, fused, shared):
        model.close()
