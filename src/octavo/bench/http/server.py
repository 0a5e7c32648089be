"""A real `octavo serve` as a child process, to be loaded. Knows the command line and the log lines that tell where it listens, nothing
else.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.config import Config
from octavo.errors import ConfigError

_READY = re.compile(r" ready after .* at (http://\S+)/v1")
_LAST_LINES = 20


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """Starts `octavo serve` with these flags on a free port of this machine; gives its address once it is ready, and ends it.

    Also when this process is told to end (SIGTERM), so that no server is left behind. Raises ConfigError with the server's own last line
    when it does not start.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with _process(flags) as address:
            yield address
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _process(flags: Sequence[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "octavo", "serve", *flags, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    stderr = process.stderr
    assert stderr is not None
    lines: list[str] = []
    reader: threading.Thread | None = None
    try:
        address = None
        for line in stderr:
            lines.append(line.rstrip())
            if found := _READY.search(line):
                address = found[1]
                break
        if address is None:
            raise ConfigError(
                f"octavo serve {' '.join(flags)} did not start: {lines[-1] if lines else 'it said nothing'}"
            )
        # What it says from here on is read, so that it never waits for us, and forgotten but for the last lines.
        reader = threading.Thread(target=_drain, args=(stderr, lines), daemon=True)
        reader.start()
        yield address
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader is not None:
            reader.join(5)
        stderr.close()


def _drain(stream: Iterator[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip())
        del lines[:-_LAST_LINES]


def command_line(config: Config) -> list[str]:
    """The flags that give this configuration, but for where it listens."""
    flags: list[str] = []
    for section_name in config.__struct_fields__:
        section = getattr(config, section_name)
        for name, default in zip(section.__struct_fields__, section.__struct_defaults__, strict=True):
            value = getattr(section, name)
            if value == default or name in ("host", "port"):
                continue
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(flag if value else "--no-" + flag.removeprefix("--"))
            else:
                flags += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return flags
