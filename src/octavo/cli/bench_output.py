"""What the verbs of `octavo bench` share: where results go, progress on a terminal, and the warning of a busy machine."""

from __future__ import annotations

import argparse
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
