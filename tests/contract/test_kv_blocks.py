"""KV blocks that were copied, or taken out and put back, hold the very bits that the forward wrote: in every backend and format."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import BackendModel, Batch, DType, KVDType
from octavo.contracts import KVLayout
from octavo.models import make_forward
from octavo.quant import Format
from support.backends import BACKENDS, make
from support.tiny_models import random_tensors, tiny_spec

SPEC = tiny_spec(windows=(None, 24))
FORMATS: list[tuple[DType, KVDType]] = [
    ("auto", "auto"),
    ("float32", "auto"),
    ("bfloat16", "bfloat16"),
    ("auto", "int8"),
]
NUM_BLOCKS = 12
TOKENS = np.random.default_rng(8).integers(0, SPEC.vocab_size, 41).astype(np.int32)
HELD = 40
"""Positions that are written before blocks are moved: the last block is half full."""


@pytest.fixture(params=[(name, *form) for name in BACKENDS for form in FORMATS], ids=str)
def model(request: pytest.FixtureRequest) -> BackendModel:
    name, dtype, kv_dtype = request.param
    return make(name).load(make_forward(SPEC), random_tensors(SPEC, Format.Q4_1), dtype=dtype, kv_dtype=kv_dtype)


def layout(model: BackendModel, block_size: int) -> KVLayout:
    groups = SPEC.kv_groups(model.bytes_per_kv_value, model.bytes_per_kv_scale)
    return KVLayout(block_size=block_size, groups=groups, num_blocks=(NUM_BLOCKS,) * len(groups))


def logits(model: BackendModel, tables: list[list[int]], start: int, stop: int) -> np.ndarray:
    batch = Batch(
        tokens=TOKENS[start:stop],
        positions=np.arange(start, stop, dtype=np.int32),
        row_starts=np.array([0, stop - start], np.int32),
        tables=tuple(np.array([table], np.int32) for table in tables),
        logit_rows=np.array([stop - start - 1], np.int32),
    )
    return np.array(model.forward(batch))


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_sequence_goes_on_in_copied_and_in_restored_blocks(model: BackendModel, block_size: int) -> None:
    kv = layout(model, block_size)
    model.allocate_kv(kv)
    count = -(-(HELD + 1) // block_size)
    own = [list(range(count)), list(range(3, 3 + count))]
    logits(model, own, 0, HELD)
    held = -(-HELD // block_size)
    content = [model.read_blocks(group, ids(*own[group][:held])) for group in range(2)]
    for group, bytes_per_token in enumerate(part.bytes_per_token for part in kv.groups):
        if bytes_per_token:
            assert content[group].shape[0] == held and content[group].dtype == np.uint8
    expected = logits(model, own, HELD, HELD + 1)

    # The sequence's next position is rewritten in the copy, and has to come out the same.
    last = own[0][held - 1], own[1][held - 1]
    copied = [list(table) for table in own]
    for group in range(2):
        copied[group][held - 1] = NUM_BLOCKS - 1
        model.copy_blocks(group, ids(last[group]), ids(NUM_BLOCKS - 1))
    assert logits(model, copied, HELD, HELD + 1).tobytes() == expected.tobytes()

    # Everything else is overwritten by other tokens meanwhile.
    for group in range(2):
        model.write_blocks(group, ids(*range(NUM_BLOCKS)), np.repeat(content[group][:1] * 0, NUM_BLOCKS, axis=0))
    restored = [list(reversed(range(NUM_BLOCKS)))[:count] for _ in range(2)]
    for group in range(2):
        model.write_blocks(group, ids(*restored[group][:held]), content[group])
        again = model.read_blocks(group, ids(*restored[group][:held]))
        assert again.tobytes() == content[group].tobytes()
    assert logits(model, restored, HELD, HELD + 1).tobytes() == expected.tobytes()
    model.close()


def test_copies_are_made_in_order(model: BackendModel) -> None:
    model.allocate_kv(layout(model, 16))
    content = model.read_blocks(0, ids(0, 1, 2))
    content[:] = np.arange(1, 4, dtype=np.uint8)[:, np.newaxis]
    model.write_blocks(0, ids(0, 1, 2), content)
    model.copy_blocks(0, ids(0, 1, 2), ids(1, 2, 2))
    assert [int(block[0]) for block in model.read_blocks(0, ids(0, 1, 2))] == [1, 1, 1]
    model.close()


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_blocks_that_are_not_there_are_refused(block: int) -> None:
    model = make(BACKENDS[1]).load(make_forward(SPEC), random_tensors(SPEC, Format.Q4_1), dtype="auto")
    model.allocate_kv(layout(model, 16))
    content = model.read_blocks(0, ids(0))
    with pytest.raises(ValueError, match="block"):
        model.copy_blocks(0, ids(0), ids(block))
    with pytest.raises(ValueError, match="block"):
        model.read_blocks(1, ids(block))
    with pytest.raises(ValueError, match="block"):
        model.write_blocks(0, ids(block), content)
    with pytest.raises(ValueError, match="bytes"):
        model.write_blocks(0, ids(0), content[:, :-1].copy())
    with pytest.raises(ValueError, match="group"):
        model.read_blocks(2, ids(0))
    with pytest.raises(ValueError, match="targets"):
        model.copy_blocks(0, ids(0), ids(1, 2))
