"""Block tables: exact ids, sizes, and which prefix hits are valid for full and sliding-window groups together."""

from __future__ import annotations

import pytest

from octavo.contracts import NULL_BLOCK, BlockId, KVGroup, KVLayout, Retention
from octavo.engine.kv import KVManager, SequenceBlocks, blocks_needed, capacity_tokens
from octavo.errors import ConfigError
from support.fake_executor import layout

TOKENS = list(range(100))


def manager(kv: KVLayout, *, caching: bool = True, budget: int = 64) -> KVManager:
    return KVManager(kv, namespace=b"m", enable_prefix_caching=caching, max_num_batched_tokens=budget)


def computed(kv: KVManager, num_tokens: int, namespace: bytes = b"") -> SequenceBlocks:
    """A sequence of the first `num_tokens` of TOKENS, computed in one step."""
    sequence = kv.sequence(namespace)
    assert kv.allocate(sequence, num_tokens) is not None
    kv.publish(sequence, TOKENS, num_tokens)
    kv.check([sequence])
    return sequence


def test_a_sequence_of_100_tokens_takes_7_blocks_of_16() -> None:
    kv = manager(layout(10, block_size=16))
    sequence = kv.sequence(b"")
    assert kv.allocate(sequence, 100) == ((0, 1, 2, 3, 4, 5, 6),)
    assert kv.usage == pytest.approx(0.7)


def test_tables_grow_only_at_block_borders() -> None:
    kv = manager(layout(10, 10))
    sequence = kv.sequence(b"")
    assert kv.allocate(sequence, 3) == ((0,), (0,))
    assert kv.allocate(sequence, 4) == ((), ())
    assert kv.allocate(sequence, 5) == ((1,), (1,))
    assert kv.allocate(sequence, 13) == ((2, 3), (2, 3))


def test_a_short_pool_changes_nothing() -> None:
    kv = manager(layout(5, 2))
    sequence = kv.sequence(b"")
    kv.allocate(sequence, 4)
    assert kv.allocate(sequence, 12) is None
    assert sequence.tables == ([0], [0])
    kv.check([sequence])


@pytest.mark.parametrize(("num_computed", "hit"), [(3, 0), (4, 1), (5, 1), (12, 3), (13, 3)])
def test_a_hit_is_of_full_computed_blocks(num_computed: int, hit: int) -> None:
    kv = manager(layout(10))
    first = computed(kv, num_computed)
    second = kv.sequence(b"")
    assert kv.lookup(second, TOKENS, 99) == hit
    kv.take_hit(second, hit)
    assert second.tables[0] == first.tables[0][:hit]
    kv.check([first, second])


def test_a_block_is_not_found_before_it_is_published() -> None:
    kv = manager(layout(10))
    first = kv.sequence(b"")
    kv.allocate(first, 8)
    assert kv.lookup(kv.sequence(b""), TOKENS, 8) == 0
    kv.publish(first, TOKENS, 7)
    assert kv.lookup(kv.sequence(b""), TOKENS, 8) == 1


def test_a_hit_stays_below_the_limit_given() -> None:
    kv = manager(layout(10))
    computed(kv, 12)
    assert [kv.lookup(kv.sequence(b""), TOKENS, limit) for limit in (12, 11, 8, 7, 3, 0)] == [3, 2, 2, 1, 0, 0]


def test_freed_blocks_stay_findable_and_the_end_of_the_chain_is_evicted_first() -> None:
    kv = manager(layout(4))
    kv.free(computed(kv, 12))
    assert kv.usage == 0.0
    other = kv.sequence(b"other")
    # The blank block, then from the end of the freed chain.
    assert kv.allocate(other, 8) == ((3, 2),)
    assert kv.lookup(kv.sequence(b""), TOKENS, 99) == 2


def test_namespaces_do_not_share() -> None:
    kv = manager(layout(10))
    computed(kv, 8, b"a")
    assert kv.lookup(kv.sequence(b"b"), TOKENS, 99) == 0
    assert kv.lookup(kv.sequence(b"a"), TOKENS, 99) == 2


def test_without_caching_nothing_is_found() -> None:
    kv = manager(layout(10), caching=False)
    kv.free(computed(kv, 8))
    assert kv.lookup(kv.sequence(b""), TOKENS, 99) == 0
    assert kv.pools[0].num_cached == 0


def test_a_window_frees_what_no_later_position_attends_to() -> None:
    kv = manager(layout(10, 10, window=5))
    sequence = computed(kv, 12)
    # Position 8 attends to 4..8, so block 0 (0..3) goes; position 9 to 5..9, which still needs block 1 (4..7).
    kv.slide(sequence, 7)
    assert kv.freed(sequence) == (0, 0)
    kv.slide(sequence, 8)
    assert kv.freed(sequence) == (0, 1)
    kv.slide(sequence, 9)
    assert kv.freed(sequence) == (0, 1)
    kv.slide(sequence, 12)
    assert sequence.tables == ([0, 1, 2], [NULL_BLOCK, NULL_BLOCK, 2])
    kv.check([sequence])


def test_a_window_group_needs_only_its_last_window_for_a_hit() -> None:
    kv = manager(layout(10, 10, window=5))
    first = computed(kv, 16)
    kv.slide(first, 16)
    kv.pools[1].forget_free()  # Blocks 0..2 of the window group are gone, only block 3 is left.
    second = kv.sequence(b"")
    assert kv.lookup(second, TOKENS, 99) == 4
    kv.take_hit(second, 4)
    assert second.tables == ([0, 1, 2, 3], [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 3])
    kv.check([first, second])


def test_a_hit_must_be_valid_for_all_groups_at_once() -> None:
    kv = manager(layout(10, 10, window=5))
    first = computed(kv, 16)
    kv.slide(first, 16)
    kv.pools[1].forget_free()
    # 4 blocks would do, but at most 15 tokens may be taken; for 3 blocks the window group lacks block 2.
    assert kv.lookup(kv.sequence(b""), TOKENS, 15) == 0


def test_a_missing_block_inside_a_window_shortens_the_hit_to_before_it() -> None:
    kv = manager(layout(10, 4, window=6))
    kv.free(computed(kv, 16))
    other = kv.sequence(b"other")
    kv.allocate(other, 4)  # Evicts the last block of the window group's chain.
    assert kv.lookup(kv.sequence(b""), TOKENS, 99) == 3


def test_windows_agree_on_a_hit_that_is_valid_for_each() -> None:
    groups = tuple(KVGroup(layers=(layer,), retention=Retention.WINDOW, window=5 + 4 * layer) for layer in range(2))
    kv = manager(KVLayout(block_size=4, groups=groups, num_blocks=(4, 4)))
    first = kv.sequence(b"")
    kv.allocate(first, 16)
    assert first.chain is not None
    first.chain.extend(TOKENS, 4)
    # The second group lacks block 3; so the hit ends at 3 blocks, for which the first group lacks block 2.
    for pool, present in zip(kv.pools, ((0, 1, 3), (0, 1, 2)), strict=True):
        for index in present:
            pool.publish(BlockId(index), first.chain.keys[index])
    assert kv.lookup(kv.sequence(b""), TOKENS, 16) == 2


def test_admission_counts_shared_blocks_once_and_keeps_a_reserve() -> None:
    kv = manager(layout(6))
    first = computed(kv, 8)
    second = kv.sequence(b"")
    hit = kv.lookup(second, TOKENS, 99)
    assert hit == 2
    # 24 tokens are 6 blocks, of which 2 are held by the first sequence and 4 are free.
    assert kv.fits(second, hit, 24, [0])
    assert not kv.fits(second, hit, 24, [1])
    assert not kv.fits(second, 0, 24, [0])
    kv.free(first)
    # Now the hit itself takes two of the six free blocks.
    assert kv.fits(second, hit, 24, [0])
    assert not kv.fits(second, hit, 25, [0])


def test_capacity_is_what_the_smallest_full_pool_holds() -> None:
    assert capacity_tokens(layout(7, block_size=16), 512) == 112
    assert capacity_tokens(layout(7, 5, block_size=16), 512) == 80


def test_a_window_pool_bounds_the_capacity_only_if_it_is_smaller_than_window_and_step() -> None:
    # 3 tokens of the window before a step of 8 tokens: 11 tokens touch at most 4 blocks of 4.
    assert capacity_tokens(layout(100, 4, window=4), 8) == 400
    assert capacity_tokens(layout(100, 3, window=4), 8) == 12
    only_window = layout(1, 4, window=4)
    only_window = KVLayout(block_size=4, groups=only_window.groups[1:], num_blocks=(4,))
    assert capacity_tokens(only_window, 8) is None


def test_blocks_needed() -> None:
    full, window = layout(1, 1, window=4).groups
    assert [blocks_needed(full, n, block_size=4, max_num_batched_tokens=8) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [blocks_needed(window, n, block_size=4, max_num_batched_tokens=8) for n in (4, 12, 13, 999)] == [1, 3, 4, 4]


@pytest.mark.parametrize(
    "kv",
    [
        KVLayout(block_size=4, groups=(), num_blocks=()),
        KVLayout(block_size=4, groups=layout(1).groups, num_blocks=(1, 1)),
        layout(0),
        layout(4, 4, window=0),
    ],
)
def test_an_impossible_layout_is_refused(kv: KVLayout) -> None:
    with pytest.raises(ConfigError):
        manager(kv)
