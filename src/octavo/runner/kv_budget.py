"""How much KV cache a memory budget buys, and how much a context needs. Pure functions of sizes; allocate nothing.

The pools of several groups are sized in the proportion in which one request of the full context length uses them, so
that all run out together for long requests. Memory is in bytes, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.contracts import KVGroup, KVLayout, Retention


def blocks_for_request(group: KVGroup, num_tokens: int, *, block_size: int, max_chunk: int) -> int:
    """Most blocks that one sequence of `num_tokens` holds in a group, when a step computes at most `max_chunk` of them.

    With a window these are the blocks of the chunk and of the window before it, however they lie on block boundaries.
    """
    whole = _ceil_div(num_tokens, block_size)
    if group.retention is Retention.FULL or group.window is None:
        return whole
    span = group.window - 1 + max_chunk
    return min(whole, _ceil_div(span - 1, block_size) + 1)


def request_bytes(groups: Sequence[KVGroup], num_tokens: int, *, block_size: int, max_chunk: int) -> int:
    """Smallest KV memory in which one sequence of `num_tokens` can run."""
    return sum(
        blocks_for_request(group, num_tokens, block_size=block_size, max_chunk=max_chunk)
        * _block_bytes(group, block_size)
        for group in groups
    )


def longest_context(
    groups: Sequence[KVGroup], memory_bytes: int, max_tokens: int, *, block_size: int, max_chunk: int
) -> int:
    """Longest sequence, up to `max_tokens`, that can run in the memory: 0 when none can, whole blocks when reduced."""

    def fits(num_tokens: int) -> bool:
        return request_bytes(groups, num_tokens, block_size=block_size, max_chunk=max_chunk) <= memory_bytes

    if fits(max_tokens):
        return max_tokens
    low, high = 0, _ceil_div(max_tokens, block_size)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * block_size) else (low, middle)
    return low * block_size


def kv_layout(
    groups: Sequence[KVGroup],
    memory_bytes: int,
    *,
    max_model_len: int,
    block_size: int,
    max_chunk: int,
    max_num_seqs: int,
    max_pinned_tokens: int = 0,
) -> KVLayout:
    """Pools within the memory. No pool is larger than `max_num_seqs` sequences of `max_model_len` and `max_pinned_tokens` can use.

    The memory must hold one such sequence, `request_bytes`, beside what is pinned.
    """
    num_pinned = max_pinned_tokens // block_size
    memory_bytes -= sum(num_pinned * _block_bytes(group, block_size) for group in groups)
    needs = [blocks_for_request(group, max_model_len, block_size=block_size, max_chunk=max_chunk) for group in groups]
    one_request = request_bytes(groups, max_model_len, block_size=block_size, max_chunk=max_chunk)
    if memory_bytes < one_request:
        raise ValueError(f"{memory_bytes} bytes of KV cache do not hold a sequence of {max_model_len} tokens")
    num_blocks = tuple(num_pinned + min(need * memory_bytes // one_request, need * max_num_seqs) for need in needs)
    return KVLayout(block_size=block_size, groups=tuple(groups), num_blocks=num_blocks)


def layout_bytes(layout: KVLayout) -> int:
    """Memory that a layout's pools take when all of it is in use."""
    return sum(
        num_blocks * _block_bytes(group, layout.block_size)
        for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
    )


def _block_bytes(group: KVGroup, block_size: int) -> int:
    return group.bytes_per_token * block_size


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
