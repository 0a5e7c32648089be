"""Files of KV content: whole or ignored, whatever was done to them, and whoever was killed while writing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.contracts import BlockContent
from octavo.errors import ConfigError
from octavo.runner.kv_files import MAX_WAITING_BYTES, OVERHEAD_BYTES, Done, KVFiles


def name(number: int, group: int = 0) -> BlockContent:
    return BlockContent(group, number.to_bytes(32, "big"))


def content(number: int, size: int = 1000) -> bytes:
    return bytes((number + index) % 251 for index in range(size))


def finish(files: KVFiles, count: int) -> list[Done]:
    done: list[Done] = []
    while len(done) < count:
        one = files.wait(10.0)
        assert one is not None
        done.append(one)
    return done


def read(files: KVFiles, of: BlockContent, size: int = 1000) -> bytes | None:
    files.read(of, size, time.time_ns())
    (done,) = finish(files, 1)
    assert done.is_ok == (done.content is not None)
    return done.content


def written(folder: Path, *numbers: int, namespace: bytes = b"model") -> list[Path]:
    """The files of so many contents, in a folder that nobody uses any more."""
    files = KVFiles(folder, namespace)
    for number in numbers:
        assert files.write(name(number), content(number))
    assert all(done.is_ok for done in finish(files, len(numbers)))
    files.close()
    return sorted(folder.glob("*.kv"))


def test_content_outlives_the_process(tmp_path: Path) -> None:
    files = KVFiles(tmp_path / "deep" / "kv", b"model")
    for group in (0, 1):
        files.write(name(7, group), content(group))
    finish(files, 2)
    assert read(files, name(7, 1)) == content(1)
    files.close()
    files = KVFiles(tmp_path / "deep" / "kv", b"model")
    found = files.scan()
    assert {file.content for file in found} == {name(7, 0), name(7, 1)}
    assert all(file.num_bytes == 1000 + OVERHEAD_BYTES for file in found)
    assert [read(files, name(7, group)) for group in (0, 1)] == [content(0), content(1)]
    assert (tmp_path / "deep" / "kv").stat().st_mode & 0o777 == 0o700
    files.close()


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return damage


def foreign(path: Path) -> None:
    """The same key of another model, under this model's name."""
    other = path.with_name("other")
    (file,) = written(other, 3, namespace=b"other")
    path.write_bytes(file.read_bytes())


def of_another_key(path: Path) -> None:
    (file,) = written(path.with_name("other"), 4)
    path.write_bytes(file.read_bytes())


def make_a_folder_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "magic": flip(0),
    "namespace": flip(20),
    "group": flip(48),
    "key": flip(60),
    "length": flip(86),
    "checksum": flip(100),
    "content": flip(OVERHEAD_BYTES + 500),
    "last byte": flip(-1),
    "cut": lambda path: os.truncate(path, 600),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "folder": make_a_folder_of,
    "foreign": foreign,
    "of another key": of_another_key,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = written(tmp_path / "kv", 3)
    DAMAGES[damage](path)
    files = KVFiles(tmp_path / "kv", b"model")
    assert read(files, name(3)) is None
    assert "ignored" in caplog.text
    # It can be written again, and is whole then.
    if damage != "folder":
        files.write(name(3), content(3))
        finish(files, 1)
        assert read(files, name(3)) == content(3)
    files.close()


def test_other_sizes_are_not_what_was_asked_for(tmp_path: Path) -> None:
    written(tmp_path, 3)
    files = KVFiles(tmp_path, b"model")
    assert read(files, name(3), 999) is None
    assert read(files, name(3), 1001) is None
    files.close()


def test_only_own_files_are_swept_listed_or_deleted(tmp_path: Path) -> None:
    (ours,) = written(tmp_path, 1)
    (theirs,) = set(written(tmp_path, 2, namespace=b"other")) - {ours}
    half = tmp_path / f".{ours.name}.tmp"
    for path in (half, tmp_path / "notes.txt", tmp_path / ".notes.tmp"):
        path.write_text("x")
    (tmp_path / f"{ours.name[:-4]}x.kv").mkdir()
    os.utime(theirs, (1, 1))
    files = KVFiles(tmp_path, b"model")
    found = files.scan()
    assert [(file.name, file.content) for file in found] == [(theirs.name, None), (ours.name, name(1))]
    assert not half.exists() and (tmp_path / "notes.txt").exists() and (tmp_path / ".notes.tmp").exists()
    files.delete(found[0].name)
    files.delete(name(1))
    files.close()
    assert not theirs.exists() and not ours.exists()


def test_a_read_makes_a_file_recently_used(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    for path in tmp_path.glob("*.kv"):
        os.utime(path, (1, 1))
    files = KVFiles(tmp_path, b"model")
    read(files, name(1))
    assert [file.content for file in files.scan()] == [name(2), name(1)]
    files.close()


def test_a_folder_is_used_by_one_process(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, b"model")
    with pytest.raises(ConfigError, match="in use"):
        KVFiles(tmp_path, b"other")
    files.close()
    files.close()
    KVFiles(tmp_path, b"other").close()


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="everybody"):
        KVFiles(tmp_path, b"model")


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        KVFiles(tmp_path / "file" / "kv", b"model")


def test_a_disk_that_is_behind_takes_no_more(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, b"model")
    block = bytes(MAX_WAITING_BYTES // 2)
    taken = [files.write(name(number), block) for number in range(8)]
    assert taken[:2] == [True, True] and not all(taken)
    finish(files, sum(taken))
    assert files.write(name(99), block)
    files.close()


def test_what_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = KVFiles(tmp_path / "kv", b"model")
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    files.write(name(1), content(1))
    (done,) = finish(files, 1)
    assert not done.is_ok and "cannot be written" in caplog.text
    files.close()


WRITER = """
import sys
from pathlib import Path
from octavo.contracts import BlockContent
from octavo.runner.kv_files import KVFiles
files = KVFiles(Path(sys.argv[1]), b"model")
number = 0
while True:
    content = bytes((number + index) % 251 for index in range(100_000))
    if files.write(BlockContent(0, number.to_bytes(32, "big")), content):
        number += 1
        if number == 20:
            print("going", flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    for attempt in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.02 * attempt)
            process.send_signal(signal.SIGKILL)
        files = KVFiles(tmp_path, b"model")
        found = files.scan()
        assert not list(tmp_path.glob(".*.tmp"))
        for file in found:
            assert file.content is not None
            number = int.from_bytes(file.content.key, "big")
            assert read(files, file.content, 100_000) == content(number, 100_000)
        assert len(found) > 0
        files.close()
