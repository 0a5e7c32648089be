"""What the verbs of `octavo bench` share: which server they ask, where results go, progress, and the warning of a busy machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--no-result`: where the result goes."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result here instead of into benchmarks/results"
    )
    where.add_argument("--no-result", action="store_true", help="write no result file")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """`--base-url`, `--model` and `--api-key`: a server that runs already, its model, and the key to send (see `server_key`)."""
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--model",
        dest="model_name",
        metavar="NAME",
        help="the model's name at the server (default: the first it lists)",
    )
    parser.add_argument(
        "--api-key", dest="key", metavar="KEY", help="key to send; default: the variable OPENAI_API_KEY"
    )


def server_key(arguments: argparse.Namespace) -> str | None:
    """The key to send, or None for none."""
    return arguments.key or os.environ.get("OPENAI_API_KEY") or None


def write_result(result: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Writes a result as those flags say."""
    from octavo.bench.results import write

    if not arguments.no_result:
        print(f"\nwritten to {write(result, arguments.json)}")


def warn_if_loaded() -> None:
    """Warns on stderr when something else uses this machine."""
    from octavo.bench.results import QUIET_LOAD, load_average

    if (load := load_average()) > QUIET_LOAD:
        print(
            f"{'!' * 78}\nWARNING: the load average is {load:.2f}. Something else is using this machine (or was, a minute\n"
            f"ago): these figures will be wrong. Measure again when it is below {QUIET_LOAD}.\n{'!' * 78}",
            file=sys.stderr,
        )


@contextmanager
def bar() -> Iterator[Any]:
    """A callback (what, done, total) that shows progress on a terminal."""
    from tqdm import tqdm

    with tqdm(total=1, disable=None, leave=False, bar_format="{percentage:3.0f}% |{bar}| {desc} [{elapsed}]") as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.set_description_str(what)

        yield progress


@contextmanager
def byte_bar() -> Iterator[Any]:
    """A callback (done, total) in bytes."""
    from tqdm import tqdm

    with tqdm(total=1, disable=None, leave=False, unit="B", unit_scale=True, desc="writing") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


@contextmanager
def count_bar() -> Iterator[Any]:
    """A callback (done, total) of requests."""
    from tqdm import tqdm

    with tqdm(total=1, disable=None, leave=False, unit="req", mininterval=0.5) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
