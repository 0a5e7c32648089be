"""KV budget: pools within the memory, contexts that fit, agreement with what the engine's KV manager will ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.contracts import KVGroup, Retention
from octavo.engine.kv import blocks_needed
from octavo.runner.kv_budget import blocks_for_request, kv_layout, layout_bytes, longest_context, request_bytes

FULL = KVGroup(layers=(0, 1), bytes_per_token=1000)
WINDOW = KVGroup(layers=(2,), retention=Retention.WINDOW, window=100, bytes_per_token=500)
groups = st.lists(
    st.builds(KVGroup, layers=st.just((0,)), bytes_per_token=st.integers(1, 5000))
    | st.builds(
        KVGroup,
        layers=st.just((0,)),
        retention=st.just(Retention.WINDOW),
        window=st.integers(1, 3000),
        bytes_per_token=st.integers(1, 5000),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


def test_known_sizes() -> None:
    assert blocks_for_request(FULL, 100, block_size=16, max_chunk=512) == 7
    assert blocks_for_request(WINDOW, 4096, block_size=16, max_chunk=64) == 12  # 163 tokens across block boundaries
    assert request_bytes((FULL, WINDOW), 4096, block_size=16, max_chunk=64) == 256 * 16_000 + 12 * 8_000
    layout = kv_layout((FULL,), 1_000_000, max_model_len=160, block_size=16, max_chunk=512, max_num_seqs=64)
    assert layout.num_blocks == (62,)
    assert layout_bytes(layout) == 62 * 16_000


def test_no_pool_is_larger_than_all_sequences_can_use() -> None:
    layout = kv_layout((FULL, WINDOW), 10**9, max_model_len=160, block_size=16, max_chunk=32, max_num_seqs=4)
    assert layout.num_blocks == (40, 40)
    layout = kv_layout(
        (FULL, WINDOW), 10**9, max_model_len=160, block_size=16, max_chunk=32, max_num_seqs=4, max_pinned_tokens=170
    )
    assert layout.num_blocks == (50, 50)


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not hold"):
        kv_layout((FULL,), 1000, max_model_len=160, block_size=16, max_chunk=32, max_num_seqs=4)


@given(
    groups,
    st.sampled_from([8, 16, 32]),
    st.integers(1, 4000),
    st.integers(1, 3000),
    st.floats(1, 20),
    st.sampled_from([0, 0, 15, 2000]),
    st.sampled_from([1, 256]),
)
def test_layout_holds_a_full_request_beside_what_is_pinned_within_the_memory(
    kv_groups: tuple[KVGroup, ...],
    block_size: int,
    max_model_len: int,
    max_chunk: int,
    times: float,
    pinned: int,
    max_num_seqs: int,
) -> None:
    one = request_bytes(kv_groups, max_model_len, block_size=block_size, max_chunk=max_chunk)
    memory = int(one * times) + pinned * sum(group.bytes_per_token for group in kv_groups)
    layout = kv_layout(
        kv_groups,
        memory,
        max_model_len=max_model_len,
        block_size=block_size,
        max_chunk=max_chunk,
        max_num_seqs=max_num_seqs,
        max_pinned_tokens=pinned,
    )
    assert layout_bytes(layout) <= memory
    for group, num_blocks in zip(kv_groups, layout.num_blocks, strict=True):
        need = blocks_for_request(group, max_model_len, block_size=block_size, max_chunk=max_chunk)
        assert num_blocks >= need + pinned // block_size


@given(groups, st.sampled_from([8, 16, 32]), st.integers(1, 4000), st.integers(1, 3000), st.integers(0, 10**8))
def test_longest_context_is_the_longest_that_fits(
    kv_groups: tuple[KVGroup, ...], block_size: int, max_tokens: int, max_chunk: int, memory: int
) -> None:
    def needs(num_tokens: int) -> int:
        return request_bytes(kv_groups, num_tokens, block_size=block_size, max_chunk=max_chunk)

    longest = longest_context(kv_groups, memory, max_tokens, block_size=block_size, max_chunk=max_chunk)
    assert 0 <= longest <= max_tokens
    assert needs(longest) <= memory
    if longest < max_tokens:
        assert longest % block_size == 0
        assert needs(min(longest + block_size, max_tokens)) > memory


@given(groups, st.sampled_from([8, 16, 32]), st.integers(1, 9000), st.integers(1, 3000))
def test_agrees_with_the_engine(
    kv_groups: tuple[KVGroup, ...], block_size: int, num_tokens: int, max_chunk: int
) -> None:
    for group in kv_groups:
        ours = blocks_for_request(group, num_tokens, block_size=block_size, max_chunk=max_chunk)
        assert ours == blocks_needed(group, num_tokens, block_size=block_size, max_num_batched_tokens=max_chunk)
