"""The command line as a process: statuses, one-line errors, closed streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from octavo.cli.main import VERBS, main
from octavo.cli.talk import RemoteTalker, show
from octavo.errors import ConfigError, ModelUnavailableError


def octavo(*arguments: str, shell: str = '"$@"') -> subprocess.CompletedProcess[str]:
    """Runs `octavo` under a shell that may redirect its streams."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell, "bash", sys.executable, "-m", "octavo", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0
    assert verb in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["--bogus"],
        ["serve", "a", "b"],
        ["serve", "--port", "65536"],
        ["chat", "--port", "1"],
        ["chat", "--api-key", "k"],
        ["chat", "--url", "http://h:99999"],
        ["chat", "--url", "h", "--block-size", "8"],
        ["complete", "--max-tokens", "many"],
        ["inspect"],
        ["pull"],
        ["doctor", "--port", "65536"],
        ["mock", "--ttft-ms", "nan"],
        ["mock", "--model", "m"],
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        status = stopped.code
    assert status == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_verb_the_help_is_shown() -> None:
    done = octavo()
    assert done.returncode == 2
    assert "verbs:" in done.stdout


@pytest.mark.parametrize(
    "shell",
    ['"$@" >&-', '"$@" <&-', '"$@" 2>&-', '"$@" | true', 'set -o pipefail; "$@" | head -1'],
)
def test_closed_streams_are_no_failure(shell: str) -> None:
    done = octavo("pull", "--list", shell=shell)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_one_line() -> None:
    done = octavo("pull", "--list", shell='"$@" >/dev/full')
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: ")
    assert done.stderr.count("\n") == 1


_SHOW = """
from octavo.__main__ import entry
from octavo.cli import main
from octavo.cli.talk import show

main.main = lambda argv: len(show(iter(["a", "\u4e16"]))) - 2
entry()
"""


def test_a_poor_terminal_shows_what_it_can() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", _SHOW], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a?", b"")


_STUCK = """
import threading
from octavo.__main__ import entry
from octavo.cli import main

def run(argv):
    ready = threading.Event()
    def hold():
        ready.set()
        while True:
            hash("busy")
    threading.Thread(target=hold, daemon=True).start()
    ready.wait()
    return 3

main.main = run
entry()
"""


def test_a_busy_thread_does_not_keep_or_change_the_status() -> None:
    done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


class _Rude(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>" if self.path.startswith("/html") else b"{}")

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "half"}]}\n\n')

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def rude_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Rude)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["", "/html"])
def test_other_servers_are_told_apart(rude_server: str, path: str) -> None:
    with pytest.raises(ModelUnavailableError, match="no OpenAI server"):
        list(RemoteTalker(rude_server + path, None, None).complete("x", {}))


def test_half_an_answer_is_a_failure(rude_server: str) -> None:
    pieces = RemoteTalker(rude_server, None, "m").complete("x", {})
    assert next(pieces) == "half"
    with pytest.raises(ModelUnavailableError, match="broke off"):
        next(pieces)


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h:70000", "http://[::1"])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        RemoteTalker(url, None, None)


def test_an_interrupted_answer_is_kept_and_its_source_closed(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield "half "
            os.kill(os.getpid(), signal.SIGINT)
            yield "an answer"
        finally:
            closed.append(True)

    assert show(pieces(), interruptible=True).startswith("half ")
    assert closed
    with pytest.raises(KeyboardInterrupt):
        show(pieces())
    assert len(closed) == 2
