"""Block tables: exact ids, sizes, and which prefix hits are valid for full and sliding-window groups together."""

from __future__ import annotations

import random

import pytest

from octavo.contracts import NULL_BLOCK, BlockId, KVGroup, KVLayout, Retention
from octavo.engine.kv import KVManager, SequenceBlocks, blocks_needed, capacity_tokens, unpinned
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


def test_blocks_waste_less_than_four_percent() -> None:
    """64 sequences of 32 to 1,024 tokens, which nothing is reserved for beyond the block they are in."""
    rng = random.Random(11)
    lengths = [rng.randint(32, 1024) for _ in range(64)]
    kv = manager(layout(64 * 64, block_size=16), budget=1024)
    for length in lengths:
        assert kv.allocate(kv.sequence(b""), length) is not None
    allocated = sum(pool.num_blocks - pool.num_free for pool in kv.pools) * 16
    assert allocated - sum(lengths) < 0.04 * sum(lengths)


def test_a_pool_holds_more_than_if_each_sequence_reserved_the_longest() -> None:
    rng = random.Random(12)
    kv = manager(layout(20 * 2048 // 16, block_size=16), budget=2048)
    count = 0
    while kv.allocate(kv.sequence(b""), rng.randint(32, 1024)) is not None:
        count += 1
    assert count >= 2.5 * 20


def test_a_private_chain_is_nobody_elses() -> None:
    """Without prefix caching but with swap space, a sequence finds its own blocks and no other's."""
    kv = KVManager(
        layout(10), namespace=b"m", enable_prefix_caching=False, max_num_batched_tokens=64, swap_bytes=1 << 20
    )
    first = computed(kv, 8)
    kv.free(first, TOKENS[:8], resumes=True)
    assert kv.find(kv.sequence(b""), TOKENS, 8).num_tokens == 0
    assert kv.find(first, TOKENS, 8).num_tokens == 8


def test_a_tail_is_found_only_where_it_ends() -> None:
    kv = manager(layout(10))
    first = kv.sequence(b"")
    kv.claim(first, TOKENS[:11])
    kv.allocate(first, 11)
    kv.publish(first, TOKENS, 11)
    assert [kv.find(kv.sequence(b""), TOKENS, limit).num_tokens for limit in (8, 9, 10, 11, 12)] == [8, 8, 10, 8, 8]
    assert kv.find(kv.sequence(b"other"), TOKENS, 10).num_tokens == 0
    second = kv.sequence(b"")
    kv.take(second, kv.find(second, TOKENS, 10))
    (copy,) = kv.take_copies()
    assert (copy.source, copy.target) == (first.tables[0][2], second.tables[0][2]) and copy.source != copy.target
    assert second.tables[0][:2] == first.tables[0][:2]
    kv.check([first, second])


def test_a_pin_keeps_blocks_and_counts_shared_ones_once() -> None:
    kv = KVManager(
        layout(8), namespace=b"m", enable_prefix_caching=True, max_num_batched_tokens=64, max_pinned_tokens=16
    )
    first = computed(kv, 13)
    assert kv.pin(first, 13) == 12
    assert kv.pin(first, 13) == 12  # once more costs nothing
    kv.free(first)
    other = kv.sequence(b"other")
    assert kv.allocate(other, 20) is not None
    assert kv.allocate(other, 24) is None
    assert kv.lookup(kv.sequence(b""), TOKENS, 99) == 3
    kv.free(other)
    longer = kv.sequence(b"")
    kv.take(longer, kv.find(longer, TOKENS, 99))
    kv.allocate(longer, 20)
    kv.publish(longer, TOKENS, 20)
    assert kv.pin(longer, 20) == 0  # two blocks more than the budget has
    assert kv.pin(longer, 16) == 16
    kv.free(longer)
    kv.check([])
    kv.unpin(b"", TOKENS[:13])
    assert kv.pins.num_blocks == [4]
    kv.unpin(b"", TOKENS[:17])
    assert kv.pins.num_blocks == [0] and kv.usage == 0.0
    kv.check([])


@pytest.mark.parametrize("evicted", [True, False])
def test_a_prompt_whose_last_block_its_window_has_passed_is_pinned_if_it_is_found_still(evicted: bool) -> None:
    kv = KVManager(
        layout(40, 40, block_size=4, window=4),
        namespace=b"m",
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        max_pinned_tokens=16,
    )
    sequence = computed(kv, 9)
    kv.slide(sequence, 12)
    if evicted:
        kv.reset_prefix_cache()
    assert kv.pin(sequence, 9) == (0 if evicted else 8)
    kv.check([sequence])
    kv.free(sequence)
    kv.check([])


def test_pins_leave_room_or_are_refused() -> None:
    assert unpinned(layout(8), 16).num_blocks == (4,)
    with pytest.raises(ConfigError, match="max-pinned-tokens"):
        unpinned(layout(8), 32)
    with pytest.raises(ConfigError, match="enable-prefix-caching"):
        KVManager(layout(8), namespace=b"", enable_prefix_caching=False, max_num_batched_tokens=8, max_pinned_tokens=4)
