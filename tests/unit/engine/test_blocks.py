"""Exact block ids and eviction order of a pool."""

from __future__ import annotations

import pytest

from octavo.contracts import BlockId
from octavo.engine.blocks import BlockPool, InvariantError


def test_blocks_are_given_out_in_ascending_order_and_the_last_blank_one_again_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([BlockId(2), BlockId(0)])
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 2, 3]


def test_cached_blocks_are_evicted_after_blank_ones_and_the_longest_free_first() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=False):
        pool.publish(block, key)
    pool.release([BlockId(1), BlockId(0), BlockId(3), BlockId(2)])
    assert pool.num_free == 5
    assert pool.num_cached == 3
    # 3 is blank and was freed last, 4 was never used; then the cached ones in the order of their release.
    assert pool.allocate(5) == [3, 4, 1, 0, 2]
    assert pool.num_cached == 0
    pool.check([[BlockId(block) for block in range(5)]])


def test_a_found_block_that_is_shared_leaves_the_eviction_order() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([first, second])
    found = pool.find(b"first")
    assert found == first
    pool.share(found)
    assert pool.allocate(1) == [second]
    assert pool.find(b"first") == first
    assert pool.find(b"second") is None
    pool.check([[first], [second]])


def test_a_shared_block_is_free_only_when_all_have_released_it() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    pool.share(block)
    pool.release([block])
    assert not pool.is_free(block)
    pool.check([[block]])
    pool.release([block])
    assert pool.is_free(block)
    assert pool.num_free == 1


def test_equal_content_is_findable_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second, first])
    assert pool.num_cached == 1
    assert pool.allocate(1) == [second]
    pool.check([[second]])


def test_forgetting_free_blocks_keeps_used_ones_findable() -> None:
    pool = BlockPool(3)
    held, freed, _ = pool.allocate(3)
    pool.publish(held, b"held")
    pool.publish(freed, b"freed")
    pool.release([freed])
    pool.forget_free()
    assert pool.find(b"held") == held
    assert pool.find(b"freed") is None
    assert pool.num_free == 1


@pytest.mark.parametrize("tables", [[], [[0, 0]], [[0], [1]], [[0], [7]]])
def test_check_finds_tables_that_disagree(tables: list[list[BlockId]]) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.check([[BlockId(0)]])
    with pytest.raises(InvariantError, match="block"):
        pool.check(tables)


def test_check_finds_a_block_released_too_often() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    pool.release([block])
    with pytest.raises(InvariantError, match="block 0"):
        pool.check([])
