"""Runs sequences through a `BackendModel` in chosen chunks, batches and orders, and gives the logits of every position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.base import BackendModel, Batch
from octavo.contracts import NULL_BLOCK, KVLayout, Retention
from octavo.models import ModelSpec

F32 = npt.NDArray[np.float32]


def layout_for(spec: ModelSpec, *, block_size: int = 16, num_tokens: int = 2048) -> KVLayout:
    """Pools for `num_tokens` tokens in every group."""
    groups = spec.kv_groups(4.0)
    return KVLayout(block_size=block_size, groups=groups, num_blocks=(-(-num_tokens // block_size),) * len(groups))


def run(
    model: BackendModel,
    layout: KVLayout,
    sequences: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    seed: int = 0,
    only_last: bool = False,
) -> list[F32]:
    """Logits [len, vocab] of each sequence, all of them in every step with at most `chunk` (None: all) tokens each.

    Blocks come from the pools in a random order, so that block tables matter. Blocks that a window has left behind are taken out of
    the tables. With `only_last` the result is [1, vocab]: of the last position.
    """
    rng = np.random.default_rng(seed)
    size = layout.block_size
    tables = []
    for num_blocks in layout.num_blocks:
        order = rng.permutation(num_blocks).tolist()
        tables.append([[order.pop() for _ in range(-(-len(tokens) // size))] for tokens in sequences])
    done = [0] * len(sequences)
    logits: list[list[F32]] = [[] for _ in sequences]
    while any(done[i] < len(tokens) for i, tokens in enumerate(sequences)):
        active = [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]
        counts = [min(chunk or len(sequences[i]), len(sequences[i]) - done[i]) for i in active]
        tokens = [t for i, n in zip(active, counts, strict=True) for t in sequences[i][done[i] : done[i] + n]]
        positions = [p for i, n in zip(active, counts, strict=True) for p in range(done[i], done[i] + n)]
        row_starts = np.cumsum([0, *counts]).astype(np.int32)
        if only_last:
            finished = [
                j for j, (i, n) in enumerate(zip(active, counts, strict=True)) if done[i] + n == len(sequences[i])
            ]
            wanted = np.array([row_starts[j + 1] - 1 for j in finished], np.int32)
            owners = [active[j] for j in finished]
        else:
            wanted = np.arange(len(tokens), dtype=np.int32)
            owners = [i for i, n in zip(active, counts, strict=True) for _ in range(n)]
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            row_starts=row_starts,
            tables=tuple(
                _table(layout, group, [tables[group][i] for i in active], [done[i] for i in active], counts)
                for group in range(len(layout.groups))
            ),
            logit_rows=wanted,
        )
        for owner, row in zip(owners, np.array(model.forward(batch)), strict=True):
            logits[owner].append(row)
        for i, n in zip(active, counts, strict=True):
            done[i] += n
    return [np.array(rows) for rows in logits]


def _table(
    layout: KVLayout, group: int, tables: list[list[int]], starts: list[int], counts: list[int]
) -> npt.NDArray[np.int32]:
    size = layout.block_size
    ends = [-(-(start + count) // size) for start, count in zip(starts, counts, strict=True)]
    padded = np.full((len(tables), max(ends)), NULL_BLOCK, np.int32)
    for row, (table, start, end) in enumerate(zip(tables, starts, ends, strict=True)):
        padded[row, :end] = table[:end]
        kv_group = layout.groups[group]
        if kv_group.retention is Retention.WINDOW and kv_group.window is not None:
            padded[row, : max(0, start - kv_group.window + 1) // size] = NULL_BLOCK
    return padded
