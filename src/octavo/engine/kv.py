"""Block tables of all sequences in all KV groups: what a prefix hit needs, what a step needs, what may be freed.

A group keeps the KV of some layers by one retention rule and has its own pool. FULL keeps every block until the
sequence ends. WINDOW frees the blocks that no later position attends to, and needs only the blocks of the last window for
a prefix hit. A sequence's tables grow in lockstep: entry i of every table stands for positions i*block_size to
(i+1)*block_size-1, with `NULL_BLOCK` where the block was freed or never needed.

Who holds a block: the tables, and nobody else. A block's content can be found by other sequences only after `publish`,
which the scheduler calls once the step that computed it has finished.

Full blocks are shared. The block that a prompt ends in the midst of, its *tail*, is copied: who has the same prompt gets a copy of its
own to go on writing, so that `n` choices compute their prompt once, and all of them together hold it once. What is not in the pools may
be outside (`offload`): then it is loaded into blocks of the sequence's own. This module does not know requests, steps or budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import msgspec

from octavo.contracts import (
    NULL_BLOCK,
    BlockContent,
    BlockCopy,
    BlockId,
    BlockTraffic,
    CacheStats,
    DiskSpace,
    KVGroup,
    KVLayout,
    Medium,
    Retention,
    TrafficReport,
)
from octavo.engine.blocks import BlockPool, require
from octavo.engine.offload import CacheCounts, Fetch, Offload
from octavo.engine.pins import Pins
from octavo.engine.prefix import HashChain, PrefixHasher, is_tail
from octavo.errors import ConfigError


def blocks_needed(group: KVGroup, num_tokens: int, *, block_size: int, max_num_batched_tokens: int) -> int:
    """Most blocks a sequence of `num_tokens` holds in a group at once, when a step computes `max_num_batched_tokens` at most."""
    whole = -(-num_tokens // block_size)
    if group.retention is Retention.FULL:
        return whole
    # A step's positions and the window before the first of them, at the least favourable alignment to blocks.
    span = _window(group) - 1 + max_num_batched_tokens
    return min(whole, (span - 1 + block_size - 1) // block_size + 1)


def capacity_tokens(layout: KVLayout, max_num_batched_tokens: int) -> int | None:
    """Longest sequence, prompt and output together, that fits the pools when alone. None: any length fits (windows only)."""
    longest: int | None = None
    for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True):
        most = num_blocks * layout.block_size
        unbounded = group.retention is Retention.WINDOW and num_blocks >= blocks_needed(
            group, most + layout.block_size, block_size=layout.block_size, max_num_batched_tokens=max_num_batched_tokens
        )
        if not unbounded:
            longest = most if longest is None else min(longest, most)
    return longest


def unpinned(layout: KVLayout, max_pinned_tokens: int) -> KVLayout:
    """What pinned prefixes leave of a layout at the least. Raises ConfigError when that is nothing."""
    num_blocks = tuple(count - max_pinned_tokens // layout.block_size for count in layout.num_blocks)
    if max_pinned_tokens and min(num_blocks) < 1:
        raise ConfigError(
            f"--max-pinned-tokens ({max_pinned_tokens}) leaves nothing of a KV cache of {min(layout.num_blocks) * layout.block_size} "
            "tokens; lower it, or give the cache more with --kv-cache-memory",
            param="max_pinned_tokens",
        )
    return msgspec.structs.replace(layout, num_blocks=num_blocks)


def _window(group: KVGroup) -> int:
    if group.window is None or group.window < 1:
        raise ConfigError(f"a KV group with sliding window needs a window of at least 1 token, got {group.window}")
    return group.window


class SequenceBlocks:
    """One sequence's block tables. Changed only by `KVManager`.

    `tables[g]` is in position order, its first `freed[g]` entries are `NULL_BLOCK`. The first `num_published` blocks of the sequence
    have been offered to the prefix cache, and the first `num_claimed` are those that it has computed or is about to.
    """

    __slots__ = (
        "chain",
        "cut",
        "fetch",
        "freed",
        "has_looked",
        "num_claimed",
        "num_landed",
        "num_published",
        "num_tokens",
        "num_told",
        "tables",
        "tail",
        "tail_key",
        "wanted",
    )

    def __init__(self, num_groups: int, chain: HashChain | None) -> None:
        self.tables: tuple[list[BlockId], ...] = tuple([] for _ in range(num_groups))
        self.freed = [0] * num_groups
        self.chain = chain
        self.num_published = 0
        self.num_claimed = 0
        self.num_landed = 0
        """Positions whose KV is known to be written: by finished steps only."""
        self.num_tokens = 0
        """Positions the tables have room for."""
        self.tail = 0
        """Positions up to and with those of the tail that is to be offered once it is written; 0: none is."""
        self.tail_key = b""
        self.wanted: list[BlockContent] = []
        """What of it shall not be lost while it waits: to be swapped out on eviction, or fetched from disk."""
        self.fetch: Fetch | None = None
        self.has_looked = False
        """Since it waits, it has been seen whether there is something to fetch from disk for it."""
        self.num_told = 0
        """Leading table entries that the executor has been told of, by `tell`."""
        self.cut = False
        """Entries that the executor has been told of are no longer true."""


class Hit(msgspec.Struct, frozen=True):
    """A cached beginning: its full blocks, all its tokens, and per group the block whose tail is to be copied (empty: none is; None: it is
    loaded from memory). `num_host_tokens` and `num_disk_tokens` were found in memory outside of the pools, swapped out or fetched."""

    num_blocks: int
    num_tokens: int
    tail: tuple[BlockId | None, ...] = ()
    tail_key: bytes = b""
    num_host_tokens: int = 0
    num_disk_tokens: int = 0


class Awaited(msgspec.Struct, frozen=True):
    """The first `num_tokens` positions of a running sequence, which another one waits for."""

    owner: SequenceBlocks
    num_tokens: int

    @property
    def is_over(self) -> bool:
        """Whether they are written, or the sequence has lost its tables."""
        return self.owner.num_tokens == 0 or self.owner.num_landed >= self.num_tokens


class KVManager:
    """The pools of a layout and the operations on sequences' tables.

    `enable_prefix_caching` False: nothing is hashed, published or found. `namespace` starts every hash chain.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        namespace: bytes,
        enable_prefix_caching: bool,
        max_num_batched_tokens: int,
        max_pinned_tokens: int = 0,
        swap_bytes: int = 0,
        disk: DiskSpace | None = None,
    ) -> None:
        if not layout.groups or len(layout.groups) != len(layout.num_blocks):
            raise ConfigError(
                f"a KV layout needs one pool per group, got {len(layout.groups)} groups, {len(layout.num_blocks)} pools"
            )
        if min(layout.num_blocks) < 1:
            raise ConfigError(
                f"every KV group needs at least one block, got {layout.num_blocks}; give the KV cache more memory"
            )
        if max_pinned_tokens and not enable_prefix_caching:
            raise ConfigError("--max-pinned-tokens needs --enable-prefix-caching", param="max_pinned_tokens")
        if disk is not None and not enable_prefix_caching:
            raise ConfigError("--kv-offloading-size needs --enable-prefix-caching", param="kv_offloading_size")
        self.layout = layout
        self.block_size = layout.block_size
        self.counts = CacheCounts()
        block_bytes = [group.bytes_per_token * layout.block_size for group in layout.groups]
        self.offload = Offload(block_bytes, self.counts, swap_bytes=swap_bytes, disk=disk)
        self._offloads = swap_bytes > 0 or disk is not None
        self.pools = tuple(
            BlockPool(num_blocks, partial(self._evicted, group)) for group, num_blocks in enumerate(layout.num_blocks)
        )
        self.caching = enable_prefix_caching
        self._max_num_batched_tokens = max_num_batched_tokens
        self._hasher = PrefixHasher(namespace, layout.block_size)
        self._windows = tuple(
            _window(group) if group.retention is Retention.WINDOW else None for group in layout.groups
        )
        self._any_window = any(window is not None for window in self._windows)
        self._nothing_new: tuple[tuple[BlockId, ...], ...] = ((),) * len(layout.groups)
        self._claims: dict[bytes, SequenceBlocks] = {}
        """Keys of blocks and tails that are not published yet, and who is to compute them."""
        self._copies: list[BlockCopy] = []
        self._parents: dict[bytes, bytes] = {}
        """With a disk: the key before that of each full block in the first pool, if there is one."""
        self._num_private = 0
        self.pins = Pins(len(layout.groups), max_pinned_tokens // layout.block_size)

    @property
    def usage(self) -> float:
        """Used share (0..1) of the fullest pool. Cached blocks that no sequence holds count as free."""
        return max((pool.num_blocks - pool.num_free) / pool.num_blocks for pool in self.pools)

    def sequence(self, namespace: bytes) -> SequenceBlocks:
        """Empty tables for a sequence within a namespace of its own beside the model's."""
        if self.caching:
            hashes: HashChain | None = self._hasher.chain(namespace)
        elif self.offload.swaps:  # only the sequence itself is to find its blocks again
            self._num_private += 1
            hashes = self._hasher.chain(b"private:%d" % self._num_private)
        else:
            hashes = None
        return SequenceBlocks(len(self.pools), hashes)

    # --- prefix lookup and admission --------------------------------------------------------------------------------

    def find(self, sequence: SequenceBlocks, token_ids: Sequence[int], max_tokens: int) -> Hit:
        """Longest cached beginning of `token_ids` of at most `max_tokens` tokens. A tail counts only if it ends exactly there.

        Changes nothing but the sequence's hash chain. The sequence must hold no blocks.
        """
        num_blocks = self.lookup(sequence, token_ids, max_tokens)
        num_host = num_disk = 0
        if self._offloads and sequence.chain is not None:
            more = self.lookup(sequence, token_ids, max_tokens, self._is_ready)
            # What another sequence loads already is soon to be shared.
            if more > num_blocks and sequence.chain.keys[num_blocks] not in self._claims:
                outside = self._outside(sequence, more)
                if self.offload.is_cheaper(Medium.MEMORY, outside, (more - num_blocks) * self.block_size):
                    from_disk = {content.key for content in outside if self.offload.is_from_disk(content)}
                    num_disk = len(from_disk) * self.block_size
                    num_host = (more - num_blocks - len(from_disk)) * self.block_size
                    num_blocks = more
        num_tokens = num_blocks * self.block_size
        if sequence.chain is not None and num_tokens < max_tokens < num_tokens + self.block_size:
            key = sequence.chain.tail_key(token_ids, max_tokens)
            tail = tuple(pool.find(key) for pool in self.pools)
            ready = (block is not None or self._is_ready(group, key) for group, block in enumerate(tail))
            if all(ready):
                num_host += 0 if None not in tail else max_tokens - num_tokens
                return Hit(num_blocks, max_tokens, tail, key, num_host, num_disk)
        return Hit(num_blocks, num_tokens, num_host_tokens=num_host, num_disk_tokens=num_disk)

    def take(self, sequence: SequenceBlocks, hit: Hit) -> None:
        """Fills empty tables with what `find` found just now. A tail needs a free block in each pool: see `take_copies`, `take_traffic`."""
        self.take_hit(sequence, hit.num_blocks)
        if hit.tail:
            self._take_tail(sequence, hit)
        self._stop_wanting(sequence)

    def _take_tail(self, sequence: SequenceBlocks, hit: Hit) -> None:
        for pool, block in zip(self.pools, hit.tail, strict=True):
            if block is not None:
                pool.touch(block)
        # Where this gives out the source itself, the copy is none.
        require(
            self.allocate(sequence, hit.num_tokens) is not None, "a tail was found, but there is no block for its copy"
        )
        for group, (source, table) in enumerate(zip(hit.tail, sequence.tables, strict=True)):
            if source is not None:
                self._copies.append(BlockCopy(group, source, table[hit.num_blocks]))
                self.counts.copied_blocks += 1
            else:
                self.offload.load(group, table[hit.num_blocks], hit.tail_key)
        self.slide(sequence, hit.num_tokens)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies to be made before the next step computes, in this order; each is told once."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_traffic(self) -> BlockTraffic | None:
        """What the next step moves into and out of the pools; told once."""
        return self.offload.take_traffic()

    def lookup(
        self,
        sequence: SequenceBlocks,
        token_ids: Sequence[int],
        max_tokens: int,
        is_there: Callable[[int, bytes], bool] | None = None,
    ) -> int:
        """Longest beginning of `token_ids`, in blocks and at most `max_tokens` tokens, that is valid for all groups at once.

        `is_there(group, key)` says whether a block counts; by default those in the pools do. Changes nothing but the sequence's hash
        chain. The sequence must hold no blocks.
        """
        num_blocks = max_tokens // self.block_size
        if sequence.chain is None or num_blocks <= 0:
            return 0
        is_there = is_there or self._is_cached
        sequence.chain.extend(token_ids, num_blocks)
        keys = sequence.chain.keys
        for group, window in enumerate(self._windows):
            if window is None:
                num_blocks = next(
                    (index for index in range(num_blocks) if not is_there(group, keys[index])), num_blocks
                )
        # A window may shorten the hit, which moves what every window needs: repeat until all agree.
        agreed = False
        while not agreed:
            agreed = True
            for group, window in enumerate(self._windows):
                if window is not None:
                    first = self._first_needed(window, num_blocks * self.block_size)
                    backwards = reversed(range(first, num_blocks))
                    miss = next((index for index in backwards if not is_there(group, keys[index])), None)
                    if miss is not None:
                        num_blocks, agreed = miss, False
        return num_blocks

    def _is_cached(self, group: int, key: bytes) -> bool:
        return self.pools[group].find(key) is not None

    def _is_ready(self, group: int, key: bytes) -> bool:
        return self.pools[group].find(key) is not None or self.offload.is_ready(BlockContent(group, key))

    def _is_reachable(self, group: int, key: bytes) -> bool:
        return self.pools[group].find(key) is not None or self.offload.is_reachable(BlockContent(group, key))

    def _outside(self, sequence: SequenceBlocks, hit: int) -> list[BlockContent]:
        """What of the blocks that a hit needs is not in the pools, in ascending position."""
        assert sequence.chain is not None
        keys = sequence.chain.keys
        firsts = [
            0 if window is None else self._first_needed(window, hit * self.block_size) for window in self._windows
        ]
        return [
            BlockContent(group, keys[index])
            for index in range(min(firsts), hit)
            for group, pool in enumerate(self.pools)
            if index >= firsts[group] and pool.find(keys[index]) is None
        ]

    def _evicted(self, group: int, block: BlockId, keys: tuple[bytes, ...]) -> None:
        self.counts.evicted_blocks += 1
        if not self._offloads:
            return
        self.offload.evicted(group, block, keys)
        # A file is of use only with those of the blocks before it. They are evicted later, perhaps never, and known for now.
        for key in keys:
            before = self._parents.pop(key, None) if group == 0 else self._parents.get(key)
            while before is not None and (parent := self.pools[group].find(before)) is not None:
                if not self.offload.save(group, parent, before):
                    break
                before = self._parents.get(before)

    def _stop_wanting(self, sequence: SequenceBlocks) -> None:
        self.offload.unwant(sequence.wanted)
        sequence.wanted = []
        sequence.fetch = None
        sequence.has_looked = False

    def _first_needed(self, window: int, position: int) -> int:
        """Index of the first block that `position` and later ones attend to."""
        return max(0, position - window + 1) // self.block_size

    def fits(self, sequence: SequenceBlocks, hit: int, num_tokens: int, reserve: Sequence[int]) -> bool:
        """Whether a sequence with no blocks can take a hit of `hit` blocks and grow to `num_tokens` with `reserve[g]` free blocks left."""
        for group, pool, window, kept in zip(self.layout.groups, self.pools, self._windows, reserve, strict=True):
            first = 0 if window is None else self._first_needed(window, hit * self.block_size)
            found = self._hit_blocks(pool, sequence, first, hit)
            shared = sum(block is not None and not pool.is_free(block) for block in found)
            if pool.num_free - kept < self._needed(group, num_tokens) - shared:
                return False
        return True

    def growth(self, sequence: SequenceBlocks, num_tokens: int) -> list[int]:
        """Per group, most blocks that a running sequence still takes to hold `num_tokens`; at least 1, to go on from there."""
        return [
            max(1, self._needed(group, num_tokens) - (len(table) - freed))
            for group, table, freed in zip(self.layout.groups, sequence.tables, sequence.freed, strict=True)
        ]

    def hit_blocks(self, sequence: SequenceBlocks, hit: int) -> list[set[BlockId]]:
        """Per group, the blocks that a hit found by `lookup` would take."""
        firsts = (
            0 if window is None else self._first_needed(window, hit * self.block_size) for window in self._windows
        )
        return [
            {block for block in self._hit_blocks(pool, sequence, first, hit) if block is not None}
            for pool, first in zip(self.pools, firsts, strict=True)
        ]

    def releasable(self, sequence: SequenceBlocks, besides: Sequence[set[BlockId]]) -> list[int]:
        """Per group, blocks that become free when a sequence gives up its own; those in `besides` do not count."""
        return [
            sum(pool.is_sole(block) and block not in kept for block in table[freed:])
            for pool, table, freed, kept in zip(self.pools, sequence.tables, sequence.freed, besides, strict=True)
        ]

    def take_hit(self, sequence: SequenceBlocks, hit: int) -> None:
        """Fills empty tables with the first `hit` blocks found by `find`: shared, or loaded into blocks of its own."""
        whole = hit
        for number, (pool, window) in enumerate(zip(self.pools, self._windows, strict=True)):
            first = 0 if window is None else self._first_needed(window, hit * self.block_size)
            table = sequence.tables[number]
            table.extend([NULL_BLOCK] * first)
            sequence.freed[number] = first
            found = self._hit_blocks(pool, sequence, first, hit)
            for block in found:  # all of them first, so that none is given out for another
                if block is not None:
                    pool.share(block)
            for index, block in enumerate(found, start=first):
                if block is None:
                    assert sequence.chain is not None
                    (block,) = pool.allocate(1)
                    self.offload.load(number, block, sequence.chain.keys[index])
                    whole = min(whole, index)
                table.append(block)
        # What is loaded is published, and counts as written, when the step that loads it has finished.
        sequence.num_published = sequence.num_claimed = whole
        sequence.num_landed = whole * self.block_size
        sequence.num_tokens = hit * self.block_size

    def claim(self, sequence: SequenceBlocks, token_ids: Sequence[int]) -> None:
        """Notes that the sequence computes the full blocks and the tail of `token_ids`, as far as no other does.

        The tail leaves out the last token, which everybody must compute to have its logits.
        """
        if sequence.chain is None:
            return
        num_full = len(token_ids) // self.block_size
        sequence.chain.extend(token_ids, num_full)
        for key in sequence.chain.keys[sequence.num_claimed : num_full]:
            self._claims.setdefault(key, sequence)
        sequence.num_claimed = max(sequence.num_claimed, num_full)
        if (len(token_ids) - 1) % self.block_size:
            sequence.tail = len(token_ids) - 1
            sequence.tail_key = sequence.chain.tail_key(token_ids, sequence.tail)
            self._claims.setdefault(sequence.tail_key, sequence)

    def awaited(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], hit: Hit, max_tokens: int
    ) -> Awaited | Fetch | None:
        """What a sequence without blocks should wait for, beyond what `find` found: that which one other sequence is computing, or what
        comes from disk, which is then begun.

        None when nobody computes what comes next, or when it is but a short tail, and there is nothing on disk.
        """
        num_blocks = max_tokens // self.block_size
        if sequence.chain is None or hit.num_tokens >= max_tokens:
            return None
        keys = sequence.chain.keys
        if hit.num_blocks == num_blocks:
            if max_tokens - hit.num_tokens < self.block_size // 2:
                return None
            tail_owner = self._claims.get(sequence.chain.tail_key(token_ids, max_tokens))
            return None if tail_owner is None else Awaited(tail_owner, max_tokens)
        owner = self._claims.get(keys[hit.num_blocks])
        if owner is None:
            return self._fetch(sequence, token_ids, hit, max_tokens)
        end = hit.num_blocks + 1
        while end < num_blocks and self._claims.get(keys[end]) is owner:
            end += 1
        return Awaited(owner, end * self.block_size)

    def _fetch(self, sequence: SequenceBlocks, token_ids: Sequence[int], hit: Hit, max_tokens: int) -> Fetch | None:
        """What a sequence waits for from disk; once per wait, so that what is not to be had does not hold it up again."""
        if not self._offloads:
            return None
        if not sequence.has_looked:
            sequence.has_looked = True
            reach = self.lookup(sequence, token_ids, max_tokens, self._is_reachable)
            self.counts.disk_query_tokens += max_tokens // self.block_size * self.block_size - hit.num_tokens
            if reach <= hit.num_blocks:
                return None
            outside = self._outside(sequence, reach)
            num_tokens = (reach - hit.num_blocks) * self.block_size
            if not self.offload.is_cheaper(Medium.DISK, outside, num_tokens):
                return None
            sequence.fetch = self.offload.fetch(outside)
            sequence.wanted += sequence.fetch.contents if sequence.fetch is not None else ()
        return None if sequence.fetch is None or sequence.fetch.is_over else sequence.fetch

    def _disclaim(self, sequence: SequenceBlocks, first: int, end: int) -> None:
        if sequence.chain is not None:
            for key in sequence.chain.keys[first:end]:
                if self._claims.get(key) is sequence:
                    del self._claims[key]

    def _drop_tail(self, sequence: SequenceBlocks) -> None:
        if sequence.tail and self._claims.get(sequence.tail_key) is sequence:
            del self._claims[sequence.tail_key]
        sequence.tail = 0

    def pick_up(self, sequence: SequenceBlocks, token_ids: Sequence[int], max_tokens: int) -> int:
        """Replaces blocks that a partly computed sequence would have to compute by such as were published meanwhile.

        Returns the number of positions it has then. A block that it has begun itself is given back.
        """
        index, num_blocks = sequence.num_landed // self.block_size, max_tokens // self.block_size
        if sequence.chain is None or index >= num_blocks:
            return sequence.num_landed
        sequence.chain.extend(token_ids, num_blocks)
        keys = sequence.chain.keys[index:num_blocks]
        found = min(
            next((number for number, key in enumerate(keys) if pool.find(key) is None), len(keys))
            for pool in self.pools
        )
        if found == 0:
            return sequence.num_landed
        for number, pool in enumerate(self.pools):
            table = sequence.tables[number]
            pool.release(table[index:])
            del table[index:]
            for block in self._hit_blocks(pool, sequence, index, index + found):
                assert block is not None
                pool.share(block)
                table.append(block)
        self._disclaim(sequence, index, index + found)
        sequence.num_published = index + found
        sequence.num_claimed = max(sequence.num_claimed, index + found)
        sequence.num_landed = sequence.num_tokens = (index + found) * self.block_size
        sequence.cut = sequence.cut or index < sequence.num_told
        sequence.num_told = min(sequence.num_told, index)
        return sequence.num_landed

    def tell(self, sequence: SequenceBlocks) -> tuple[int | None, tuple[tuple[BlockId, ...], ...]]:
        """What the executor has not been told of a sequence's tables: how many entries to keep (None: all), and those that follow."""
        if sequence.num_told == len(sequence.tables[0]) and not sequence.cut:
            return None, self._nothing_new
        kept, sequence.cut = sequence.num_told if sequence.cut else None, False
        new = tuple(tuple(table[sequence.num_told :]) for table in sequence.tables)
        sequence.num_told = len(sequence.tables[0])
        return kept, new

    @staticmethod
    def _hit_blocks(pool: BlockPool, sequence: SequenceBlocks, first: int, hit: int) -> list[BlockId | None]:
        """Blocks `first` to `hit` - 1 of a hit; None where they are outside of the pool."""
        return [] if sequence.chain is None else [pool.find(key) for key in sequence.chain.keys[first:hit]]

    def _needed(self, group: KVGroup, num_tokens: int) -> int:
        return blocks_needed(
            group, num_tokens, block_size=self.block_size, max_num_batched_tokens=self._max_num_batched_tokens
        )

    # --- growth, publication, release -------------------------------------------------------------------------------

    def slide(self, sequence: SequenceBlocks, position: int) -> None:
        """Frees the blocks that no position from `position` on attends to."""
        if not self._any_window:
            return
        for number, (pool, window) in enumerate(zip(self.pools, self._windows, strict=True)):
            if window is None:
                continue
            first, freed, table = self._first_needed(window, position), sequence.freed[number], sequence.tables[number]
            if first > freed:
                pool.release(table[freed:first])
                table[freed:first] = [NULL_BLOCK] * (first - freed)
                sequence.freed[number] = first

    def freed(self, sequence: SequenceBlocks) -> tuple[int, ...]:
        """Per group, table entries from the front that are freed; empty when no group has a window."""
        return tuple(sequence.freed) if self._any_window else ()

    def allocate(self, sequence: SequenceBlocks, num_tokens: int) -> tuple[tuple[BlockId, ...], ...] | None:
        """Grows the tables to hold `num_tokens` positions and returns the new blocks per group.

        None, with nothing changed, if a pool is short.
        """
        if num_tokens <= sequence.num_tokens:
            return self._nothing_new
        count = self._missing(sequence, num_tokens)
        if any(pool.num_free < count for pool in self.pools):
            return None
        new = []
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            blocks = pool.allocate(count)
            table.extend(blocks)
            new.append(tuple(blocks))
        sequence.num_tokens += count * self.block_size
        return tuple(new)

    def _missing(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """Blocks per group that a sequence lacks to hold so many positions."""
        return max(0, -(-num_tokens // self.block_size) - sequence.num_tokens // self.block_size)

    def has_room(self, wanted: Sequence[tuple[SequenceBlocks, int]]) -> bool:
        """Whether all these sequences can grow to hold so many positions."""
        count = sum(self._missing(sequence, num_tokens) for sequence, num_tokens in wanted)
        return all(pool.num_free >= count for pool in self.pools)

    def publish(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Offers what is below position `num_computed` to the prefix cache, full blocks and tail. The caller knows its KV is written."""
        sequence.num_landed = num_computed
        if sequence.chain is None:
            return
        if sequence.tail and num_computed >= sequence.tail:
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                pool.publish(table[sequence.tail // self.block_size], sequence.tail_key)
            self._drop_tail(sequence)
        num_full = num_computed // self.block_size
        if num_full <= sequence.num_published:
            return
        sequence.chain.extend(token_ids, num_full)
        for index in range(sequence.num_published, num_full):
            key = sequence.chain.keys[index]
            if index and self.offload.has_disk:
                self._parents[key] = sequence.chain.keys[index - 1]
            # What is computed is not freed yet: windows free a block only when a later step needs it no more. What was loaded may be.
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                if table[index] != NULL_BLOCK:
                    pool.publish(table[index], key)
        self._disclaim(sequence, sequence.num_published, num_full)
        sequence.num_published = num_full
        sequence.num_claimed = max(sequence.num_claimed, num_full)

    def free(self, sequence: SequenceBlocks, token_ids: Sequence[int] = (), *, resumes: bool = False) -> None:
        """Empties the tables. What was published stays findable until its blocks are given out again; the hash chain stays too.

        With `token_ids` the block in which the written positions end is offered as a tail: whoever goes on from there, this sequence
        itself after a preemption or a beam that continues it, need not compute it again. It is the first to be evicted. With `resumes`
        the sequence will go on: what it has is swapped out, should it be evicted meanwhile.
        """
        self._stop_wanting(sequence)
        tail = sequence.num_landed // self.block_size if sequence.num_landed % self.block_size else None
        tail_key = b""
        if tail is not None and sequence.chain is not None and token_ids:
            tail_key = sequence.chain.tail_key(token_ids, sequence.num_landed)
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                pool.publish(table[tail], tail_key)
        if resumes and self.offload.swaps and sequence.chain is not None:
            for group, freed in enumerate(sequence.freed):
                keys = sequence.chain.keys[freed : sequence.num_published] + ([tail_key] if tail_key else [])
                sequence.wanted += (BlockContent(group, key) for key in keys)
            self.offload.want(sequence.wanted)
        for number, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
            if tail is not None:
                pool.release(reversed(table[tail:]), worth_little=True)
                del table[tail:]
            pool.release(reversed(table[sequence.freed[number] :]))
            table.clear()
            sequence.freed[number] = 0
        self._disclaim(sequence, sequence.num_published, sequence.num_claimed)
        self._drop_tail(sequence)
        sequence.num_published = sequence.num_claimed = 0
        sequence.num_landed = sequence.num_tokens = sequence.num_told = 0
        sequence.cut = False

    def save_all(self) -> None:
        """Everything that is cached is to be on disk, as far as there is room: what would be evicted last stays for certain."""
        for group, pool in enumerate(self.pools):
            for block, keys in pool.findable():
                for key in keys:
                    if not is_tail(key):
                        self.offload.save(group, block, key)

    def count_hit(self, hit: Hit) -> None:
        """Counts what a starting prompt has found."""
        self.counts.host_hit_tokens += hit.num_host_tokens
        self.counts.disk_hit_tokens += hit.num_disk_tokens
        self.counts.device_hit_tokens += hit.num_tokens - hit.num_host_tokens - hit.num_disk_tokens

    def take_stats(self) -> CacheStats:
        """What happened to the cache since the last call, with the present sizes."""
        swap_bytes, disk_bytes = self.offload.used_bytes
        pinned_tokens = max(self.pins.num_blocks) * self.block_size
        return self.counts.take(swap_bytes=swap_bytes, disk_bytes=disk_bytes, pinned_tokens=pinned_tokens)

    def landed(self, report: TrafficReport | None, num_tokens: int, step_s: float) -> None:
        """A step that computed `num_tokens` has finished, with what its executor reports of blocks outside of the pools."""
        self.offload.landed(report)
        self.offload.note_step(num_tokens, step_s)

    def pin(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """Keeps the full blocks of a sequence's first `num_tokens` tokens, which are published, from being evicted.

        Returns how many tokens they hold; 0 when the budget is exhausted, there is nothing to keep, or a block that a window has passed is
        there no more.
        """
        num_blocks = num_tokens // self.block_size
        if sequence.chain is None or not 0 < num_blocks <= sequence.num_published:
            return 0
        keys = sequence.chain.keys
        if keys[num_blocks - 1] not in self.pins:
            blocks: list[list[BlockId]] = []
            for pool, table, window in zip(self.pools, sequence.tables, self._windows, strict=True):
                first = 0 if window is None else self._first_needed(window, num_blocks * self.block_size)
                for index in range(first, num_blocks):
                    if table[index] != NULL_BLOCK:
                        pool.publish(table[index], keys[index])  # an equal block that was findable instead may be gone
                found = self._hit_blocks(pool, sequence, first, num_blocks)
                blocks.append([block for block in found if block is not None])
                if len(blocks[-1]) < len(found):
                    return 0
            if not self.pins.fits(blocks):
                return 0
            for pool, group in zip(self.pools, blocks, strict=True):
                for block in group:
                    pool.share(block)
            self.pins.add(keys[num_blocks - 1], blocks)
        return num_blocks * self.block_size

    def unpin(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Lets the blocks of a pinned prompt go. What is not pinned is ignored."""
        num_blocks = len(token_ids) // self.block_size
        if num_blocks:
            hashes = self._hasher.chain(namespace)
            hashes.extend(token_ids, num_blocks)
            self._unpin(hashes.keys[-1])

    def unpin_all(self) -> None:
        """Lets the blocks of all pinned prompts go."""
        for key in self.pins.keys:
            self._unpin(key)

    def _unpin(self, key: bytes) -> None:
        blocks = self.pins.remove(key)
        if blocks is not None:
            for pool, group in zip(self.pools, blocks, strict=True):
                pool.release(reversed(group))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks that no sequence holds, pinned ones included."""
        self.unpin_all()
        self.offload.reset()
        self._parents.clear()
        for pool in self.pools:
            pool.forget_free()

    def check(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raises InvariantError unless pools and tables agree. `sequences` are all that hold blocks. For tests: O(blocks)."""
        sequences = list(sequences)
        for number, pool in enumerate(self.pools):
            tables = (sequence.tables[number][sequence.freed[number] :] for sequence in sequences)
            pool.check(chain(tables, self.pins.tables(number)))
        for sequence in sequences:
            for table, freed, window in zip(sequence.tables, sequence.freed, self._windows, strict=True):
                require(
                    len(table) * self.block_size == sequence.num_tokens, "a table's length differs from the sequence's"
                )
                require(all(block == NULL_BLOCK for block in table[:freed]), "a freed entry still names a block")
                require(NULL_BLOCK not in table[freed:], "an entry is empty that was not freed")
                require(window is not None or freed == 0, "blocks were freed in a group that keeps all")
            require(sequence.num_published * self.block_size <= sequence.num_tokens, "more blocks published than held")
            require(sequence.num_published <= sequence.num_claimed, "a published block was never claimed")
            require(sequence.num_landed <= sequence.num_tokens, "more positions are written than there is room for")
        self.offload.check()
        for key, owner in self._claims.items():
            require(owner in sequences, "a sequence that holds no blocks claims to compute one")
            assert owner.chain is not None
            claimed = owner.chain.keys[owner.num_published : owner.num_claimed]
            claimed += [owner.tail_key] if owner.tail else []
            require(key in claimed, "a claim is left of a block that is published")
