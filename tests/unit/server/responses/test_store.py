"""Kept responses: bounds, tenants, and what a crash leaves."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ResponsesConfig
from octavo.errors import ConfigError
from octavo.server.responses.store import ResponseStore, Stored


def stored(name: str, text: str = "", status: str = "completed") -> Stored:
    return Stored({"id": name, "status": status, "text": text}, [{"own": name}], [{"all": name}])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "responses.sqlite"


@pytest.fixture
def make(path: Path) -> Iterator[Any]:
    opened = []

    def open_store(**config: Any) -> ResponseStore:
        opened.append(ResponseStore(ResponsesConfig(**config), path))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def test_a_response_comes_back_as_it_was(make: Any, path: Path) -> None:
    store = make()
    store.put("alice", stored("a", "ü\u0000"))
    assert store.get("alice", "a") == stored("a", "ü\u0000")
    assert store.get("bob", "a") is None
    assert not store.delete("bob", "a")
    assert store.delete("alice", "a")
    assert store.get("alice", "a") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_survives_a_restart(make: Any) -> None:
    first = make()
    first.put("alice", stored("a"))
    first.put("alice", stored("b", status="in_progress"))
    first.close()
    second = make()
    assert second.get("alice", "a") == stored("a")
    ended = second.get("alice", "b").body
    assert ended["status"] == "failed"
    assert "before" in ended["error"]["message"]


def test_number_bytes_and_age_are_bounded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(responses_store_max=3, responses_store_max_bytes=4096, responses_store_ttl=100)
    for name in "abcde":
        store.put("alice", stored(name))
    assert [name for name in "abcde" if store.get("alice", name)] == ["c", "d", "e"]
    store.put("alice", stored("f", "x" * 4000))
    assert [name for name in "cdef" if store.get("alice", name)] == ["f"]
    store.put("alice", stored("g", "x" * 5000))
    assert store.get("alice", "g") is None
    store.put("alice", stored("h"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert store.get("alice", "h") is None
    store.put("bob", stored("i"))
    [(count,)] = store._database.execute("SELECT count(*) FROM responses")
    assert count == 1


def test_a_later_state_replaces_an_earlier_one(make: Any) -> None:
    store = make()
    store.put("alice", stored("a", status="in_progress"))
    store.put("alice", stored("a", "done"))
    assert store.get("alice", "a") == stored("a", "done")


def test_deleted_text_is_gone_from_the_file(make: Any, path: Path) -> None:
    store = make()
    store.put("alice", stored("a", "sentinel-4711" * 50))
    store.delete("alice", "a")
    store.close()
    assert b"sentinel-4711" not in path.read_bytes()


def test_a_file_that_is_none_of_ours_is_refused(make: Any, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all, certainly not" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        make()
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version=99")
    other.close()
    with pytest.raises(ConfigError, match="another version"):
        make()
