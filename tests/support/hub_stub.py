"""A stand-in for the Hugging Face hub on 127.0.0.1: the few routes that downloading a snapshot needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubStub:
    """Repositories as {id: {file name: content}}, at revisions "main" and "v1". `requests` lists "METHOD path"."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], *, gated: frozenset[str] = frozenset()) -> None:
        self.repositories = repositories
        self.gated = gated
        self.requests: list[str] = []
        self.endpoint = ""

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for since the last call."""
        names = [line.rpartition("/")[2] for line in self.requests if line.startswith("GET ") and "/resolve/" in line]
        self.requests.clear()
        return sorted(names)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of a GET."""
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, route, revision, *rest = [*parts[2 if is_api else 0 :], "", "", "", ""]
        repository = f"{owner}/{name}"
        if repository not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"Repository not found"
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"Access to model is restricted"
        if revision not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"Invalid rev id"
        files = self.repositories[repository]
        if is_api and route == "revision":
            siblings = [{"rfilename": file} for file in files]
            return 200, {}, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        if is_api and route == "tree":
            return 200, {}, json.dumps([tree_entry(file, content) for file, content in files.items()]).encode()
        file = "/".join(part for part in rest if part)
        if route != "resolve" or file not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"Entry not found"
        headers = {"ETag": f'"{blob_id(files[file])}"', "X-Repo-Commit": COMMIT}
        return 200, headers, files[file]


def blob_id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def tree_entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": blob_id(content)}


@contextmanager
def running(stub: HubStub) -> Iterator[HubStub]:
    """Serves the stub from a thread while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, *, with_body: bool) -> None:
            stub.requests.append(f"{self.command} {self.path}")
            status, headers, body = stub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply(with_body=True)

        def do_HEAD(self) -> None:
            self.reply(with_body=False)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
