"""`octavo mock`: the same server over a scripted executor, for practising clients, streaming and errors without a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from octavo.cli.flags import add_flags, duration, resolve
from octavo.config import Config
from octavo.obs.events import EventLog

NO_BENCHMARK = " (MOCK: no model answers here, and its speed is scripted: this is no benchmark)"


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("mock", help="a server without a model, for practising clients", description=__doc__)
    parser.add_argument("--ttft-ms", type=duration, default=0.0, metavar="MS", help="time to the first token")
    parser.add_argument("--itl-ms", type=duration, default=0.0, metavar="MS", help="time between tokens")
    add_flags(parser, ("scheduler", "server", "responses"))
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", default=("mock",), help="names of the pretended model"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until told to stop."""
    config = resolve(arguments)
    from octavo.frontend.engine import AsyncEngine
    from octavo.frontend.mock import mock_engine
    from octavo.server.run import serve

    def make(of: Config, events: EventLog, on_death: Callable[[str], None]) -> AsyncEngine:
        return mock_engine(of, events, on_death, ttft_s=arguments.ttft_ms / 1e3, itl_s=arguments.itl_ms / 1e3)

    return serve(config, make, banner=NO_BENCHMARK)
