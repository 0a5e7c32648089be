"""`octavo` and `python -m octavo` as a process: what surrounds `cli.main`, from the first Ctrl-C to the last thread."""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and ends the process with its status; 130 for Ctrl-C.

    Whatever a thread is doing then, such as loading a model that Ctrl-C made useless, ends with the process.
    """
    status = 1

    def end() -> None:
        # A thread in native code cannot be unwound by a dying interpreter, which aborts instead.
        if threading.active_count() > 1:
            logging.shutdown()
            os._exit(status)

    atexit.register(end)  # first, so that it is called last
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123 - open until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what this terminal cannot show
    try:
        status = _run(argv)
    except SystemExit as request:  # argparse
        status = request.code if isinstance(request.code, int) else 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _run(argv: Sequence[str] | None) -> int:
    from octavo.cli.main import failed, main  # here, so that Ctrl-C is clean while this takes its time

    try:
        return main(argv)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter must not fail again at exit
            if failed(error):
                sys.exit(1)


if __name__ == "__main__":
    entry()
