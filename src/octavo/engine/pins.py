"""Pinned prefixes: cached blocks that are never evicted, within a budget of blocks.

A pin holds references to blocks as a sequence does, so no pool needs to know of it. Prefixes that begin alike share blocks, which
count once.
This module does not know tokens, requests or pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from octavo.contracts import BlockId

Blocks = Sequence[Sequence[BlockId]]
"""Per group, block ids."""


class Pins:
    """Pins by the key of their last block. `max_blocks`: most different blocks of a group that are pinned."""

    def __init__(self, num_groups: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._pins: dict[bytes, Blocks] = {}
        self._counts: tuple[Counter[BlockId], ...] = tuple(Counter() for _ in range(num_groups))

    @property
    def num_blocks(self) -> list[int]:
        """Per group, different pinned blocks."""
        return [len(counts) for counts in self._counts]

    def __contains__(self, key: bytes) -> bool:
        return key in self._pins

    def fits(self, blocks: Blocks) -> bool:
        """Whether the budget allows to pin these too."""
        return all(
            len(counts) + sum(block not in counts for block in added) <= self._max_blocks
            for counts, added in zip(self._counts, blocks, strict=True)
        )

    def add(self, key: bytes, blocks: Blocks) -> None:
        """Notes a new pin; the caller has taken a reference to each block."""
        self._pins[key] = blocks
        for counts, added in zip(self._counts, blocks, strict=True):
            counts.update(added)

    def remove(self, key: bytes) -> Blocks | None:
        """Forgets a pin, if there is one. The caller releases the references to the blocks returned."""
        blocks = self._pins.pop(key, None)
        if blocks is not None:
            for counts, removed in zip(self._counts, blocks, strict=True):
                counts.subtract(removed)
                for block in removed:
                    if not counts[block]:
                        del counts[block]
        return blocks

    @property
    def keys(self) -> list[bytes]:
        """All pins."""
        return list(self._pins)

    def tables(self, group: int) -> Iterator[Sequence[BlockId]]:
        """The blocks of each pin in a group."""
        return (blocks[group] for blocks in self._pins.values())
