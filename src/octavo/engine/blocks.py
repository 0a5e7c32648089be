"""The pool of KV blocks of one group: ids, reference counts, and which free blocks still hold content worth finding again.

A block is *used* while at least one block table refers to it, else *free*. A free block is either *blank*, or *cached*: its content has at
least one key and can be found until the block is given out again. All operations are O(1) per block.

Eviction order: blank blocks are given out first, last freed first (their memory is warm, and untouched memory stays uncommitted). Then
cached ones that were released as worth little, the last such first. Then all other cached ones, least recently released, shared
or touched first. Tables are released from their end, so the deepest block of a chain goes before those it builds on.

This module does not know requests, tokens or what a key means.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator

from octavo.contracts import BlockId


class InvariantError(AssertionError):
    """The engine's bookkeeping contradicts itself: a bug of ours, found by a `check()`."""


def require(condition: bool, message: str) -> None:
    """Raises InvariantError unless the condition holds. Unlike `assert` it also works under `python -O`."""
    if not condition:
        raise InvariantError(message)


class BlockPool:
    """`num_blocks` blocks with ids 0..num_blocks-1, all blank at first and given out in ascending order.

    `on_eviction(block, keys)` is called before a cached block is given out.
    """

    def __init__(
        self, num_blocks: int, on_eviction: Callable[[BlockId, tuple[bytes, ...]], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._on_eviction = on_eviction
        self._references = [0] * num_blocks
        self._keys: list[tuple[bytes, ...]] = [()] * num_blocks
        self._blank = [BlockId(block) for block in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._index: dict[bytes, BlockId] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out now, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, used or free. O(blocks)."""
        return sum(bool(keys) for keys in self._keys)

    def is_free(self, block: BlockId) -> bool:
        """Whether no table refers to the block."""
        return self._references[block] == 0

    def is_sole(self, block: BlockId) -> bool:
        """Whether exactly one table refers to the block."""
        return self._references[block] == 1

    def allocate(self, count: int) -> list[BlockId]:
        """Gives out `count` blocks with one reference each; their old content is forgotten. The caller checked `num_free`."""
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                if self._on_eviction is not None:
                    self._on_eviction(block, self._keys[block])
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def find(self, key: bytes) -> BlockId | None:
        """The block with this content. It stays where it is; `share` keeps it from being given out."""
        return self._index.get(key)

    def share(self, block: BlockId) -> None:
        """Adds a reference to a block that `find` returned."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def touch(self, block: BlockId) -> None:
        """Makes a block that `find` returned the last to be evicted, if it is free."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def release(self, blocks: Iterable[BlockId], *, worth_little: bool = False) -> None:
        """Takes one reference from each block, in the order in which they shall become evictable."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keys[block]:
                    self._cached[block] = None
                    self._cached.move_to_end(block, last=not worth_little)
                else:
                    self._blank.append(block)

    def publish(self, block: BlockId, key: bytes) -> None:
        """Makes a used block's content findable, perhaps under a further key. If another block already has this content, that one
        stays the findable one."""
        if key not in self._index:
            self._keys[block] += (key,)
            self._index[key] = block

    def findable(self) -> Iterator[tuple[BlockId, tuple[bytes, ...]]]:
        """All blocks that can be found and their keys, the free ones first, in the order in which they would be evicted."""
        for block in self._cached:
            yield block, self._keys[block]
        for number, keys in enumerate(self._keys):
            if keys and self._references[number]:
                yield BlockId(number), keys

    def forget_free(self) -> None:
        """Forgets the content of all free blocks. Used ones stay findable."""
        while self._cached:
            block, _ = self._cached.popitem()
            self._forget(block)
            self._blank.append(block)

    def _forget(self, block: BlockId) -> None:
        require(bool(self._keys[block]), f"cached block {block} has no key")
        for key in self._keys[block]:
            del self._index[key]
        self._keys[block] = ()

    def check(self, tables: Iterable[Iterable[BlockId]]) -> None:
        """Raises InvariantError unless the pool is consistent and its references are exactly those of `tables`."""
        expected: Counter[BlockId] = Counter()
        for table in tables:
            expected.update(table)
        free = Counter(self._blank)
        free.update(self._cached.keys())
        for number in range(self.num_blocks):
            block = BlockId(number)
            references = self._references[block]
            require(
                references == expected[block], f"block {block}: {references} references, {expected[block]} in tables"
            )
            require(
                free[block] == (references == 0), f"block {block}: {references} references, {free[block]} times free"
            )
            keys = self._keys[block]
            require(
                all(self._index.get(key) == block for key in keys), f"block {block}: a key does not lead back to it"
            )
            require(
                (block in self._cached) == (references == 0 and bool(keys)),
                f"block {block}: in the wrong free list",
            )
        require(expected.total() == sum(self._references), "a table refers to a block outside the pool")
        num_keys = sum(len(keys) for keys in self._keys)
        require(len(self._index) == num_keys, f"{len(self._index)} keys in the index, {num_keys} in blocks")
