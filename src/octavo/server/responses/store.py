"""Responses that are kept, in SQLite: bounded in number, bytes and age. Calls block; the server makes them in a thread.

A response belongs to a tenant; others do not see that it exists. Knows no protocol: bodies and items are JSON.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from octavo.config import ResponsesConfig
from octavo.errors import ConfigError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL, status TEXT NOT NULL,
  body BLOB NOT NULL, input BLOB NOT NULL, history BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created);
"""
_VERSION = 1


class Stored(msgspec.Struct, frozen=True):
    """A kept response: its object, its own input items, and the conversation up to and including its output."""

    body: dict[str, Any]
    input: list[dict[str, Any]]
    history: list[dict[str, Any]]


class ResponseStore:
    """The file of one server. May be called from several threads."""

    def __init__(self, config: ResponsesConfig, path: Path) -> None:
        """Opens or makes the file; responses that a crash left unfinished become failed ones. Raises ConfigError."""
        self._max = config.responses_store_max
        self._max_bytes = config.responses_store_max_bytes
        self._ttl_s = config.responses_store_ttl
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA secure_delete=ON;")
            [(version,)] = self._database.execute("PRAGMA user_version")
            if version not in (0, _VERSION):
                raise ConfigError(
                    f"{path} was made by another version of octavo; remove it", param="responses_store_path"
                )
            self._database.executescript(f"{_SCHEMA} PRAGMA user_version={_VERSION};")
            self._end_unfinished()
            self._trim()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"--responses-store-path {path} cannot be used: {error}", param="responses_store_path"
            ) from None

    def put(self, tenant: str, stored: Stored) -> None:
        """Keeps a response, or replaces it. What is too old, too many or too large goes, oldest first."""
        body, own, history = (msgspec.json.encode(part) for part in (stored.body, stored.input, stored.history))
        size = len(body) + len(own) + len(history)
        with self._lock:
            self._database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                " bytes = excluded.bytes, status = excluded.status, body = excluded.body, history = excluded.history",
                (stored.body["id"], tenant, time.time(), size, stored.body["status"], body, own, history),
            )
            self._trim()

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """A response of this tenant, None when there is none (any more)."""
        with (
            self._lock,
            closing(
                self._database.execute(
                    "SELECT body, input, history FROM responses WHERE id = ? AND tenant = ? AND created > ?",
                    (response_id, tenant, time.time() - self._ttl_s),
                )
            ) as found,
        ):
            row = found.fetchone()
        return None if row is None else Stored(*(msgspec.json.decode(part) for part in row))

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response. False when there was none."""
        with self._lock:
            done = self._database.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant))
            return done.rowcount > 0

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._database.close()

    def _trim(self) -> None:
        run = self._database.execute
        run("DELETE FROM responses WHERE created <= ?", (time.time() - self._ttl_s,))
        run(
            "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER newest AS number,"
            " sum(bytes) OVER newest AS total FROM responses WINDOW newest AS (ORDER BY created DESC, rowid DESC))"
            " WHERE number > ? OR total > ?)",
            (self._max, self._max_bytes),
        )

    def _end_unfinished(self) -> None:
        rows = self._database.execute("SELECT id, body FROM responses WHERE status = 'in_progress'").fetchall()
        for response_id, body in rows:
            error = {"code": "server_error", "message": "the server ended before the response was complete"}
            ended = {**msgspec.json.decode(body), "status": "failed", "error": error}
            self._database.execute(
                "UPDATE responses SET status = 'failed', body = ? WHERE id = ?",
                (msgspec.json.encode(ended), response_id),
            )
