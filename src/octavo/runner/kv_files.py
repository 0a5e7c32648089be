"""Content of KV blocks in files: one file per block and group, written and read by a thread of its own.

A file names itself: format, namespace (weights, arithmetic, KV format, layout), group, key, and a SHA-256 over all of it. Whatever does not
check out is as good as absent. Files are written under another name and renamed, so that a process that is killed leaves whole files
and rubbish that the next one sweeps. The checksum finds damage, not forgery: the folder must belong to who runs the server.

One process at a time uses a folder, by a lock on it; several models may use it one after the other. This module does not know which
content is worth keeping.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import queue
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from octavo.contracts import BlockContent, DiskFile
from octavo.errors import ConfigError

_log = logging.getLogger("octavo")

_MAGIC = b"octavo KV block\x01"
_HEAD = struct.Struct("<16s32sI32sQ32s")
"""Magic, namespace, group, key, bytes of content, SHA-256 of what stands before and of the content."""
OVERHEAD_BYTES = _HEAD.size
_NAME = re.compile(r"[0-9a-f]{16}-\d{1,4}-[0-9a-f]{64}\.kv")
_SWEEP = re.compile(r"\.[0-9a-f]{16}-\d{1,4}-[0-9a-f]{64}\.kv\.tmp")
MAX_WAITING_BYTES = 64 << 20
"""Most content that waits to be written; what comes while a slow disk is behind is not kept."""
_WARNINGS_S = 60.0
"""No more than one warning of a kind in so long."""


class Done:
    """What became of one order: `content` is what was read, None where nothing usable was there, or where it was written."""

    __slots__ = ("content", "is_ok", "is_write", "name", "num_bytes", "seconds")

    def __init__(
        self, name: BlockContent, *, is_write: bool, is_ok: bool, num_bytes: int, seconds: float, content: bytes | None
    ) -> None:
        self.name = name
        self.is_write = is_write
        self.is_ok = is_ok
        self.num_bytes = num_bytes
        self.seconds = seconds
        self.content = content


class KVFiles:
    """The files of one model in a folder, which is made if need be.

    `namespace` stands for everything that decides the bytes besides tokens. Raises ConfigError when the folder cannot be used, or another
    process uses it.
    """

    def __init__(self, folder: Path, namespace: bytes) -> None:
        self._folder = folder
        self._namespace = hashlib.sha256(namespace).digest()
        self._prefix = self._namespace.hex()[:16]
        self._lock = _locked(folder)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._room = threading.Condition()
        self._warned_s: dict[str, float] = {}
        self._thread = threading.Thread(target=self._work, name="octavo-kv-files", daemon=True)
        self._thread.start()

    def scan(self) -> tuple[DiskFile, ...]:
        """All files of KV content in the folder, the least recently used first. Sweeps what a killed process left half written."""
        found: list[tuple[int, DiskFile]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _SWEEP.fullmatch(entry.name):
                    with suppress(OSError):
                        Path(entry.path).unlink()
                elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    prefix, group, key = entry.name.removesuffix(".kv").split("-")
                    own = BlockContent(int(group), bytes.fromhex(key)) if prefix == self._prefix else None
                    found.append((status.st_mtime_ns, DiskFile(entry.name, own, status.st_size)))
        return tuple(file for _, file in sorted(found, key=lambda pair: (pair[0], pair[1].name)))

    # --- orders -----------------------------------------------------------------------------------------------------

    def write(self, name: BlockContent, content: bytes, patience_s: float = 0.0) -> bool:
        """Orders content to be written. False, with nothing done, if the disk is too far behind, and stays so for so long."""
        with self._room:
            if not self._room.wait_for(lambda: self._has_room(len(content)), patience_s):
                return False
            self._waiting_bytes += len(content)
        self._orders.put(lambda: self._write(name, content))
        return True

    def _has_room(self, num_bytes: int) -> bool:
        return self._waiting_bytes + num_bytes <= MAX_WAITING_BYTES

    def read(self, name: BlockContent, num_bytes: int, used_ns: int) -> None:
        """Orders content of so many bytes to be read. `used_ns`: when the file counts as last used."""
        self._orders.put(lambda: self._read(name, num_bytes, used_ns))

    def delete(self, file: BlockContent | str) -> None:
        """Orders a file to be deleted, after what was ordered before."""
        path = self._path(file) if isinstance(file, BlockContent) else self._folder / file
        self._orders.put(lambda: self._delete(path))

    def done(self) -> Iterator[Done]:
        """What has been done since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def wait(self, timeout_s: float) -> Done | None:
        """The next thing done, if it is within so long."""
        try:
            return self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Finishes the orders and lets the folder go. Idempotent."""
        self._orders.put(None)
        self._thread.join()
        self._lock.close()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _write(self, name: BlockContent, content: bytes) -> None:
        began_s = time.perf_counter()
        path = self._path(name)
        half = path.with_name(f".{path.name}.tmp")
        is_ok = True
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(half, flags, 0o600), "wb") as file:
                file.write(self._head(name, content))
                file.write(content)
            half.replace(path)
        except OSError as error:
            is_ok = False
            with suppress(OSError):
                half.unlink()
            self._warn("write", f"KV content cannot be written to {self._folder}: {error.strerror}")
        with self._room:
            self._waiting_bytes -= len(content)
            self._room.notify()
        seconds = time.perf_counter() - began_s
        self._done.put(Done(name, is_write=True, is_ok=is_ok, num_bytes=len(content), seconds=seconds, content=None))

    def _read(self, name: BlockContent, num_bytes: int, used_ns: int) -> None:
        began_s = time.perf_counter()
        path = self._path(name)
        content: bytes | None = None
        try:
            with path.open("rb") as file:
                head, body = file.read(_HEAD.size), file.read(num_bytes + 1)
            if len(body) == num_bytes and hmac.compare_digest(head, self._head(name, body)):
                content = body
                os.utime(path, ns=(used_ns, used_ns))
            else:
                self._warn("read", f"{path} is damaged, or no KV content of this model; it is ignored")
        except (OSError, MemoryError) as error:
            self._warn("read", f"{path} cannot be read: {error}; it is ignored")
        seconds = time.perf_counter() - began_s
        self._done.put(
            Done(name, is_write=False, is_ok=content is not None, num_bytes=num_bytes, seconds=seconds, content=content)
        )

    def _delete(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()

    def _path(self, name: BlockContent) -> Path:
        return self._folder / f"{self._prefix}-{name.group}-{name.key.hex()}.kv"

    def _head(self, name: BlockContent, content: bytes) -> bytes:
        """The head of a file with this content."""
        fields = (_MAGIC, self._namespace, name.group, name.key, len(content))
        start = _HEAD.pack(*fields, b"")[: -hashlib.sha256().digest_size]
        digest = hashlib.sha256(start)
        digest.update(content)
        return start + digest.digest()

    def _warn(self, kind: str, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s.get(kind, -_WARNINGS_S) >= _WARNINGS_S:
            self._warned_s[kind] = now_s
            _log.warning("%s", text)


def _locked(folder: Path) -> _Lock:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"--kv-offloading-folder {folder} can be written by everybody, who could put false content there; take that "
                "right away (chmod o-w)",
                param="kv_offloading_folder",
            )
        return _Lock(folder / "lock")
    except BlockingIOError:
        raise ConfigError(
            f"--kv-offloading-folder {folder} is in use by another server; give each its own",
            param="kv_offloading_folder",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--kv-offloading-folder {folder} cannot be used: {error.strerror}", param="kv_offloading_folder"
        ) from None


class _Lock:
    """A lock on a file that ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Lets go. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
