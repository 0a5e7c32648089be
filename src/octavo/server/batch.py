"""A file of requests answered offline: the server's own application without sockets, so that a line means what the request would.

Lines are OpenAI's batch lines. Answers are appended as they come, each a whole line; what an earlier, killed run has answered is not done
again. Knows no flags and no terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.types import Message

from octavo.errors import InvalidRequestError
from octavo.server.app import App

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SYNC_INTERVAL_S = 1.0


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `custom_id` is unique in its file and stands in the answer's line."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The requests of a file; empty lines are skipped. Raises InvalidRequestError naming the line that is none."""
    decoder = msgspec.json.Decoder(BatchLine)
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, RecursionError, ValueError) as error:
                raise InvalidRequestError(f"{path}, line {number} is no batch request: {error}") from None
            if line.method != "POST" or line.url not in URLS:
                raise InvalidRequestError(
                    f"{path}, line {number}: {line.method[:20]} {line.url[:80]} is not possible; expected POST and one of {', '.join(URLS)}"
                )
            yield line


def check_input(path: Path) -> set[str]:
    """The ids of a file's requests. Raises InvalidRequestError for a wrong line or an id that stands twice."""
    seen: set[str] = set()
    for line in read_lines(path):
        if line.custom_id in seen:
            raise InvalidRequestError(f"{path}: the custom_id {line.custom_id[:80]!r} stands twice")
        seen.add(line.custom_id)
    return seen


def open_output(path: Path) -> tuple[BinaryIO, set[str]]:
    """The file of answers, ready for more, and the ids of those it holds. Half a line at its end, which a killed run left, is cut off.

    Raises InvalidRequestError for a file that holds something else.
    """
    done: set[str] = set()
    file = path.open("a+b")
    file.seek(0)
    end = 0
    for number, text in enumerate(file, start=1):
        if not text.endswith(b"\n"):
            break
        try:
            done.add(json.loads(text)["custom_id"])
        except (ValueError, LookupError, TypeError):
            file.close()
            raise InvalidRequestError(
                f"{path}, line {number} is no answer of a batch; give another output file"
            ) from None
        end += len(text)
    file.truncate(end)
    file.seek(end)
    return file, done


async def run_batch(
    app: App, lines: Iterator[BatchLine], output: BinaryIO, *, concurrency: int, advance: Callable[[], None]
) -> int:
    """Answers all lines, `concurrency` at a time, calling `advance` after each. Returns how many ended in an error."""
    failures = 0
    source = iter(lines)
    synced_s = asyncio.get_running_loop().time()

    async def work() -> None:
        nonlocal failures, synced_s
        for line in source:  # shared by all workers; each line goes to one of them
            status, body = await _answer(app, line)
            failures += status != 200
            output.write(msgspec.json.encode(_output_line(line, status, body)) + b"\n")
            output.flush()
            now_s = asyncio.get_running_loop().time()
            if now_s - synced_s > SYNC_INTERVAL_S:
                synced_s = now_s
                await asyncio.to_thread(os.fsync, output.fileno())
            advance()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    os.fsync(output.fileno())
    return failures


async def _answer(app: App, line: BatchLine) -> tuple[int, Any]:
    """Status and body; waits where the queue is full."""
    if line.body.get("stream"):
        error = {"message": "stream is not possible in a batch", "type": "invalid_request_error", "param": "stream"}
        return 400, {"error": {**error, "code": "invalid_value"}}
    while True:
        status, body = await _call(app, line.url, msgspec.json.encode(line.body))
        if status != 429:
            return status, body
        await asyncio.sleep(0.2)


async def _call(app: App, path: str, body: bytes) -> tuple[int, Any]:
    status, parts = 500, bytearray()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("batch", 80),
    }
    await app(scope, receive, send)
    return status, msgspec.json.decode(parts)


def _output_line(line: BatchLine, status: int, body: Any) -> dict[str, Any]:
    request_id = uuid.uuid4().hex
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }
