"""Moves content of KV blocks between the cache, memory and files, as plans say, and reports what became of it.

Everything here is a copy of bytes of the backend's own. Reading and writing files is left to `KVFiles`, so a step takes as long as the
copies do. This module does not know why something is moved.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice

import numpy as np

from octavo.backends.base import I32, BackendModel
from octavo.contracts import BlockContent, BlockCopy, BlockSave, BlockTraffic, Medium, TrafficReport
from octavo.errors import EngineError
from octavo.runner.kv_files import Done, KVFiles

_PATIENCE_S = 2.0
"""How long patient saves wait for a disk that does not get on; none waits again after one that waited in vain."""
_WAIT_S = 0.02
"""How long a step without rows waits for content from disk: no longer than a request that arrives meanwhile may wait for it."""


class BlockMover:
    """The mover of one model. `files` None: nothing is kept on disk. It closes `files`."""

    def __init__(self, model: BackendModel, files: KVFiles | None = None) -> None:
        self._model = model
        self._files = files
        self._memory: dict[BlockContent, bytes] = {}
        self._block_bytes: dict[int, int] = {}
        self._unsaved: list[BlockContent] = []
        self._load_bytes = 0
        self._load_s = 0.0
        self._num_fetching = 0

    def move(self, traffic: BlockTraffic, copies: Sequence[BlockCopy]) -> None:
        """Moves what a step moves before it computes. Raises EngineError when content is not where the plan believes it."""
        patience_s = _PATIENCE_S if traffic.patient else 0.0
        for group, saves in groupby(traffic.saves, key=lambda save: save.group):
            for together in _batches(saves):
                content = self._model.read_blocks(group, _ids([save.block for save in together]))
                for save, own in zip(together, content, strict=True):
                    if not self._keep(save, own.tobytes(), patience_s):
                        patience_s = 0.0
        for group, pairs in groupby(copies, key=lambda copy: copy.group):
            both = tuple(pairs)
            self._model.copy_blocks(group, _ids([pair.source for pair in both]), _ids([pair.target for pair in both]))
        self._load(traffic)
        now_ns = time.time_ns()
        for number, name in enumerate(traffic.fetches):
            # The deepest block of a chain counts as used before those it builds on, a microsecond each.
            self._fetch(name, now_ns - 1000 * number)
        for name in traffic.drops:
            self._memory.pop(name, None)
        for file in traffic.deletes:
            if self._files is not None:
                self._files.delete(file)

    def report(self, *, waits: bool) -> TrafficReport | None:
        """What became of it since the last report. With `waits`, and nothing to report, waits a little for what is on its way."""
        done: list[Done] = []
        if self._files is not None:
            done.extend(self._files.done())
            if waits and not done and self._num_fetching and (first := self._files.wait(_WAIT_S)) is not None:
                done += [first, *self._files.done()]
        if not done and not self._unsaved and not self._load_bytes:
            return None
        reads, writes = [one for one in done if not one.is_write], [one for one in done if one.is_write]
        for one in reads:
            self._num_fetching -= 1
            if one.content is not None:
                self._memory[one.name] = one.content
        unsaved, self._unsaved = tuple(self._unsaved), []
        load_bytes, load_s, self._load_bytes, self._load_s = self._load_bytes, self._load_s, 0, 0.0
        return TrafficReport(
            saved=tuple(one.name for one in writes if one.is_ok),
            unsaved=(*unsaved, *(one.name for one in writes if not one.is_ok)),
            fetched=tuple(one.name for one in reads if one.is_ok),
            missing=tuple(one.name for one in reads if not one.is_ok),
            load_bytes=load_bytes,
            load_s=load_s,
            fetch_bytes=sum(one.num_bytes for one in reads if one.is_ok),
            fetch_s=sum(one.seconds for one in reads if one.is_ok),
            write_bytes=sum(one.num_bytes for one in writes if one.is_ok),
            write_s=sum(one.seconds for one in writes if one.is_ok),
        )

    def close(self) -> None:
        """Finishes writing. Idempotent."""
        if self._files is not None:
            self._files.close()
        self._memory.clear()

    def _keep(self, save: BlockSave, content: bytes, patience_s: float) -> bool:
        name = BlockContent(save.group, save.key)
        if save.medium is Medium.MEMORY:
            self._memory[name] = content
        elif self._files is None or not self._files.write(name, content, patience_s):
            self._unsaved.append(name)
            return False
        return True

    def _load(self, traffic: BlockTraffic) -> None:
        began_s = time.perf_counter()
        for group, loads in groupby(traffic.loads, key=lambda load: load.group):
            together = tuple(loads)
            contents = [self._memory.get(BlockContent(group, load.key)) for load in together]
            present = [content for content in contents if content is not None]
            if len(present) < len(contents):
                raise EngineError("content of a KV block is not in memory, where it was said to be")
            whole = np.frombuffer(b"".join(present), np.uint8).reshape(len(present), -1)
            self._model.write_blocks(group, _ids([load.block for load in together]), whole)
            self._load_bytes += whole.nbytes
        self._load_s += time.perf_counter() - began_s

    def _fetch(self, name: BlockContent, used_ns: int) -> None:
        if self._files is None:
            raise EngineError("content of a KV block is asked for from disk, but there is none")
        if name.group not in self._block_bytes:
            self._block_bytes[name.group] = self._model.read_blocks(name.group, _ids([0])).nbytes
        self._num_fetching += 1
        self._files.read(name, self._block_bytes[name.group], used_ns)


def _batches(saves: Iterable[BlockSave]) -> Iterator[tuple[BlockSave, ...]]:
    """Few at a time, so that little memory holds them twice."""
    iterator = iter(saves)
    while batch := tuple(islice(iterator, 64)):
        yield batch


def _ids(blocks: Sequence[int]) -> I32:
    return np.array(blocks, np.int32)
