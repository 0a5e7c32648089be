"""Content of KV blocks outside of the cache: which is in memory, which on disk, and what is to be brought and taken in a step.

Two reasons to keep content, one mechanism. *Swap*: blocks of preempted requests are saved in memory when they are evicted, and dropped
when nobody wants them any more. *Disk*: any full block that is evicted is written to a file, least recently used files go first, and the
files outlive the process. What is wanted from disk is first *fetched* into memory, which takes steps during which the request waits and
holds nothing; from memory it is *loaded* in the step that begins with it.

This directory decides and remembers; the executor moves the bytes as the plan's `BlockTraffic` says, and reports. What it has not
reported is not relied on. A step that failed leaves nothing to rely on. This module does not know pools, sequences or tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from octavo.contracts import (
    BlockContent,
    BlockId,
    BlockLoad,
    BlockSave,
    BlockTraffic,
    CacheStats,
    DiskSpace,
    Medium,
    TrafficReport,
)
from octavo.engine.blocks import require
from octavo.engine.prefix import is_tail

FETCH_BYTES = 512 << 20
"""Most memory for what has been fetched and not yet loaded."""
_SMOOTHING = 0.2
"""Weight of the newest measurement in a running mean."""


class Fetch(msgspec.Struct):
    """Content on its way from disk to memory, for a sequence that waits for it."""

    contents: tuple[BlockContent, ...]
    offload: Offload

    @property
    def is_over(self) -> bool:
        """Whether all of it has come, or never will."""
        return not any(self.offload.is_fetching(content) for content in self.contents)


class CacheCounts:
    """What happened to the cache since the last `take`."""

    def __init__(self) -> None:
        self.device_hit_tokens = self.host_hit_tokens = self.disk_hit_tokens = self.disk_query_tokens = 0
        self.waits = self.evicted_blocks = self.copied_blocks = 0
        self.swapped_out_blocks = self.swapped_in_blocks = 0
        self.saved_files = self.unsaved_files = self.fetched_files = self.missing_files = 0
        self.write_bytes = self.fetch_bytes = 0
        self.write_s = self.fetch_s = 0.0

    def add(self, report: TrafficReport) -> None:
        """Adds what an executor reports."""
        self.saved_files += len(report.saved)
        self.unsaved_files += len(report.unsaved)
        self.fetched_files += len(report.fetched)
        self.missing_files += len(report.missing)
        self.write_bytes += report.write_bytes
        self.write_s += report.write_s
        self.fetch_bytes += report.fetch_bytes
        self.fetch_s += report.fetch_s

    def take(self, *, swap_bytes: int, disk_bytes: int, pinned_tokens: int) -> CacheStats:
        """All counts, with the present sizes; starts over."""
        stats = CacheStats(**vars(self), swap_bytes=swap_bytes, disk_bytes=disk_bytes, pinned_tokens=pinned_tokens)
        self.__init__()  # type: ignore[misc]
        return stats


class Offload:
    """The directory of one engine. `block_bytes[g]`: content of a block of group g. `swap_bytes`: most memory for swapped content.

    `disk` None: nothing is kept on disk.
    """

    def __init__(
        self, block_bytes: Sequence[int], counts: CacheCounts, *, swap_bytes: int = 0, disk: DiskSpace | None = None
    ) -> None:
        self._block_bytes = tuple(block_bytes)
        self._swap_bytes = swap_bytes
        self._disk = disk
        self._files: OrderedDict[BlockContent | str, int] = OrderedDict()
        """Bytes of all files, the least recently used first. Files of other models are known by name."""
        self._disk_used = 0
        self._unusable: set[BlockContent | str] = set()
        """Files that are not known to be written yet."""
        self._memory: set[BlockContent] = set()
        self._swapped: set[BlockContent] = set()
        """What of it counts as swapped; the rest was fetched."""
        self._memory_used = {"swap": 0, "fetch": 0}
        self._users: Counter[BlockContent] = Counter()
        self._fetching: set[BlockContent] = set()
        self._traffic = _Traffic()
        self._compute_s: float | None = None
        self._bring_s: dict[Medium, float | None] = {Medium.MEMORY: None, Medium.DISK: None}
        """Measured seconds: to compute a token, to bring a byte."""
        self.counts = counts
        for file in disk.files if disk is not None else ():
            self._add_file(file.name if file.content is None else file.content, file.num_bytes)
        self._make_room(0)

    @property
    def swaps(self) -> bool:
        """Whether there is memory to save blocks of preempted requests in."""
        return self._swap_bytes > 0

    @property
    def has_disk(self) -> bool:
        """Whether content is kept on disk."""
        return self._disk is not None

    @property
    def is_fetching_any(self) -> bool:
        """Whether content is on its way from disk, so that waiting for it makes sense."""
        return bool(self._fetching)

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Memory for swapped content, and all files."""
        return self._memory_used["swap"], self._disk_used

    # --- what is where ----------------------------------------------------------------------------------------------

    def is_ready(self, content: BlockContent) -> bool:
        """Whether it can be loaded in this step."""
        return content in self._memory

    def is_reachable(self, content: BlockContent) -> bool:
        """Whether it can be loaded now or after a fetch."""
        return content in self._memory or (content in self._files and content not in self._unusable)

    def is_fetching(self, content: BlockContent) -> bool:
        """Whether it is on its way from disk."""
        return content in self._fetching

    def is_cheaper(self, medium: Medium, contents: Sequence[BlockContent], num_tokens: int) -> bool:
        """Whether bringing content takes less time than computing its tokens, as far as has been measured."""
        bring_s, compute_s = self._bring_s[medium], self._compute_s
        if bring_s is None or compute_s is None:
            return True
        return bring_s * sum(self._block_bytes[content.group] for content in contents) < compute_s * num_tokens

    def note_step(self, num_tokens: int, step_s: float) -> None:
        """Learns what computing takes, from a step long enough to tell."""
        if num_tokens >= 32 and step_s > 0:
            self._compute_s = _mean(self._compute_s, step_s / num_tokens)

    # --- who wants what ---------------------------------------------------------------------------------------------

    def want(self, contents: Iterable[BlockContent]) -> None:
        """A preempted sequence wants this content back: should it be evicted, it is to be saved."""
        self._users.update(contents)

    def unwant(self, contents: Iterable[BlockContent]) -> None:
        """Undoes `want` and `fetch`: what nobody wants leaves memory after the loads of this step."""
        for content in contents:
            self._users[content] -= 1
            if self._users[content] <= 0:
                del self._users[content]
                if content in self._memory:
                    self._forget_memory(content)
                    self._traffic.drops[content] = None

    def fetch(self, contents: Sequence[BlockContent]) -> Fetch | None:
        """A sequence wants content from disk, as far as memory for it lasts; None when there is none. To be undone by `unwant`."""
        wanted = []
        for content in contents:
            if content not in self._memory and content not in self._fetching:
                size = self._block_bytes[content.group]
                if self._memory_used["fetch"] + size > FETCH_BYTES:
                    break
                self._memory_used["fetch"] += size
                self._fetching.add(content)
                self._traffic.fetches.append(content)
            wanted.append(content)
        for content in reversed(wanted):  # the deepest blocks go before those they build on
            if content in self._files:
                self._files.move_to_end(content)
        if not wanted:
            return None
        self._users.update(wanted)
        return Fetch(tuple(wanted), self)

    # --- blocks come and go -----------------------------------------------------------------------------------------

    def evicted(self, group: int, block: BlockId, keys: Sequence[bytes]) -> None:
        """A block's content is about to be overwritten. It is saved where it is wanted."""
        size = self._block_bytes[group]
        for key in keys:
            content = BlockContent(group, key)
            wanted = content in self._users and content not in self._memory
            if wanted and self._memory_used["swap"] + size <= self._swap_bytes:
                if content in self._traffic.drops:  # the executor still has it
                    del self._traffic.drops[content]
                else:
                    self._traffic.saves.append(BlockSave(group, block, key, Medium.MEMORY))
                self._memory.add(content)
                self._swapped.add(content)
                self._memory_used["swap"] += size
                self.counts.swapped_out_blocks += 1
            elif self._disk is not None and not is_tail(key):
                self.save(group, block, key)

    def save(self, group: int, block: BlockId, key: bytes) -> bool:
        """A full block's content is to be on disk, if it is not. Returns whether it had to be written."""
        content = BlockContent(group, key)
        if self._disk is None:
            return False
        if content in self._files:
            return False
        num_bytes = self._block_bytes[group] + self._disk.overhead_bytes
        if not self._make_room(num_bytes):
            return False
        self._add_file(content, num_bytes)
        if content in self._traffic.deletes:  # the file is still there
            del self._traffic.deletes[content]
            return False
        self._unusable.add(content)
        self._traffic.saves.append(BlockSave(group, block, key, Medium.DISK))
        return True

    def load(self, group: int, block: BlockId, key: bytes) -> None:
        """Content that `is_ready` is to be put into a block."""
        content = BlockContent(group, key)
        require(content in self._memory, "a block is loaded whose content is not in memory")
        self._traffic.loads.append(BlockLoad(group, block, key))
        if content in self._swapped:
            self.counts.swapped_in_blocks += 1

    def is_from_disk(self, content: BlockContent) -> bool:
        """Whether content in memory was fetched."""
        return content in self._memory and content not in self._swapped

    def reset(self) -> None:
        """Deletes all files of this model. What requests want stays in memory."""
        for file in [file for file in self._files if isinstance(file, BlockContent) and file not in self._unusable]:
            self._delete(file)

    # --- steps ------------------------------------------------------------------------------------------------------

    def take_traffic(self) -> BlockTraffic | None:
        """What the next step is to move; told once."""
        traffic, self._traffic = self._traffic, _Traffic()
        return traffic.frozen()

    def landed(self, report: TrafficReport | None) -> None:
        """A step has finished: what its executor reports is true."""
        if report is None:
            return
        for content in report.saved:
            self._unusable.discard(content)
        for content in report.unsaved:
            self._remove_file(content)
        for content in (*report.fetched, *report.missing):
            if content in self._fetching:
                self._fetching.remove(content)
                self._memory_used["fetch"] -= self._block_bytes[content.group]
        for content in report.fetched:
            if content in self._users and content not in self._memory:
                self._memory.add(content)
                self._memory_used["fetch"] += self._block_bytes[content.group]
            elif content not in self._memory:
                self._traffic.drops[content] = None
        for content in report.missing:
            if content in self._files:
                self._unusable.add(content)
                self._delete(content)
        self.counts.add(report)
        if report.fetch_bytes:
            self._bring_s[Medium.DISK] = _mean(self._bring_s[Medium.DISK], report.fetch_s / report.fetch_bytes)
        if report.load_bytes:
            self._bring_s[Medium.MEMORY] = _mean(self._bring_s[Medium.MEMORY], report.load_s / report.load_bytes)

    def failed(self, traffic: BlockTraffic | None) -> None:
        """A step raised, and nobody knows how much of its traffic, or of what it would have reported, has happened."""
        for save in traffic.saves if traffic is not None else ():
            content = BlockContent(save.group, save.key)
            if save.medium is Medium.MEMORY and content in self._memory:
                self._forget_memory(content)
                self._traffic.drops[content] = None
        for content in tuple(self._fetching):
            self._fetching.remove(content)
            self._memory_used["fetch"] -= self._block_bytes[content.group]
            self._traffic.drops[content] = None
        for file in tuple(self._unusable):
            self._delete(file)
        for content in traffic.drops if traffic is not None else ():
            if content not in self._memory:
                self._traffic.drops[content] = None
        for file in traffic.deletes if traffic is not None else ():
            if file not in self._files:
                self._traffic.deletes[file] = None

    # --- memory and files -------------------------------------------------------------------------------------------

    def _forget_memory(self, content: BlockContent) -> None:
        self._memory.remove(content)
        kind = "swap" if content in self._swapped else "fetch"
        self._swapped.discard(content)
        self._memory_used[kind] -= self._block_bytes[content.group]

    def _make_room(self, num_bytes: int) -> bool:
        """Deletes files, least recently used first, so that `num_bytes` more are within the bound; False if they cannot be."""
        if self._disk is None or num_bytes > self._disk.max_bytes:
            return False
        while self._disk_used + num_bytes > self._disk.max_bytes:
            # Files in use were used last, so this looks at one or few.
            free = (file for file in self._files if file not in self._unusable and file not in self._fetching)
            if (file := next(free, None)) is None:
                return False
            self._delete(file)
        return True

    def _add_file(self, file: BlockContent | str, num_bytes: int) -> None:
        self._files[file] = num_bytes
        self._disk_used += num_bytes

    def _remove_file(self, file: BlockContent | str) -> None:
        self._unusable.discard(file)
        self._disk_used -= self._files.pop(file, 0)

    def _delete(self, file: BlockContent | str) -> None:
        self._remove_file(file)
        self._traffic.deletes[file] = None

    def check(self) -> None:
        """Raises InvariantError unless counts and contents agree. For tests: O(files)."""
        require(self._disk_used == sum(self._files.values()), "the files' bytes are not their sum")
        require(self._disk is None or self._disk_used <= self._disk.max_bytes, "more on disk than allowed")
        swap = sum(self._block_bytes[content.group] for content in self._swapped)
        fetched = (self._memory - self._swapped) | self._fetching
        require(self._memory_used["swap"] == swap <= self._swap_bytes, "swapped bytes are not their sum, or too many")
        require(
            self._memory_used["fetch"] == sum(self._block_bytes[content.group] for content in fetched),
            "fetched bytes are not their sum",
        )
        require(self._swapped <= self._memory, "swapped content is not in memory")
        require(all(content in self._users for content in self._memory), "content is in memory that nobody wants")
        require(not self._fetching & self._memory, "content is fetched that is in memory")
        require(not self._memory & self._traffic.drops.keys(), "content is to be dropped that is wanted")


class _Traffic:
    """What the next plan is to move, as collected so far."""

    def __init__(self) -> None:
        self.saves: list[BlockSave] = []
        self.loads: list[BlockLoad] = []
        self.fetches: list[BlockContent] = []
        self.drops: dict[BlockContent, None] = {}
        self.deletes: dict[BlockContent | str, None] = {}

    def frozen(self) -> BlockTraffic | None:
        if not (self.saves or self.loads or self.fetches or self.drops or self.deletes):
            return None
        return BlockTraffic(
            saves=tuple(self.saves),
            loads=tuple(self.loads),
            fetches=tuple(self.fetches),
            drops=tuple(self.drops),
            deletes=tuple(self.deletes),
        )


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
