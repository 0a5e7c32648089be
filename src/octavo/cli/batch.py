"""`octavo batch -i in.jsonl -o out.jsonl`: answer a file of OpenAI batch requests offline. Killed, it goes on where it was."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from octavo.cli.flags import add_flags, resolve
from octavo.cli.serve import with_model
from octavo.config import Config
from octavo.errors import ConfigError

SECTIONS = ("model", "cache", "scheduler", "backend")
REPORT_INTERVAL_S = 10.0


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("batch", help="answer a file of requests offline", description=__doc__)
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument(
        "-i", "--input-file", required=True, type=Path, metavar="FILE", help="requests, one JSON line each"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, type=Path, metavar="FILE", help="answers; those it already holds are kept"
    )
    add_flags(parser, SECTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answers what is not answered yet. The exit status is 1 when a request ended in an error."""
    from octavo.server.batch import check_input, open_output

    config = resolve(with_model(arguments))
    source, target = arguments.input_file, arguments.output_file
    if target.exists() and source.samefile(target):
        raise ConfigError("the input file and the output file are the same", param="output_file")
    wanted = check_input(source)
    output, done = open_output(target)
    with output:
        failures = asyncio.run(_answer(config, source, output, wanted - done, len(wanted))) if wanted - done else 0
    print(f"{len(wanted)} requests are answered in {target}; {failures} of this run ended in an error", file=sys.stderr)
    return int(failures > 0)


async def _answer(config: Config, source: Path, output: BinaryIO, left: set[str], total: int) -> int:
    from octavo.frontend.engine import AsyncEngine
    from octavo.obs.events import EventLog
    from octavo.obs.metrics import Metrics
    from octavo.server.app import App
    from octavo.server.batch import read_lines, run_batch

    events = EventLog()
    engine = AsyncEngine(config, events)
    await engine.start()
    app = App(config, engine, events, Metrics(engine.model.names[0]))
    lines = (line for line in read_lines(source) if line.custom_id in left)
    try:
        with _progress(total, total - len(left)) as advance:
            return await run_batch(app, lines, output, concurrency=2 * config.scheduler.max_num_seqs, advance=advance)
    finally:
        await engine.close()
        await app.close()


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, elsewhere a line now and then. Yields what is to be called after each request."""
    from tqdm import tqdm

    on_terminal = sys.stderr.isatty()
    with tqdm(
        total=total,
        initial=done,
        unit="request",
        mininterval=0.1 if on_terminal else REPORT_INTERVAL_S,
        leave=on_terminal,
    ) as bar:

        def advance() -> None:
            bar.update()

        yield advance
