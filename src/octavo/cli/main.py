"""`octavo VERB`: finds the verb and runs it. Each verb is a module of this package and is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from octavo.cli.flags import Parser
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.obs import logs

VERBS = {
    "serve": "serve a model to OpenAI clients",
    "chat": "talk to a model in the terminal",
    "complete": "continue a text",
    "batch": "answer a file of requests offline",
    "pull": "fetch a model of the catalogue",
    "inspect": "show what a model is and what of it fits this machine",
    "doctor": "show what this machine offers and what octavo makes of it",
    "bench": "measure kernels and throughput, make up models, report results",
    "mock": "a server without a model, for practising clients",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit status: 0 fine, 1 failed, 2 wrong usage."""
    logs.set_up()
    parsed = parse(sys.argv[1:] if argv is None else argv)
    return 2 if parsed is None else run(parsed)


def parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    """A command line's verb and flags; exits with status 2 when they are wrong. Without a verb shows the help and returns None."""
    parser = Parser(prog="octavo", description="An LLM inference server that gives the same bits whatever the load.")
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", parser_class=Parser)
    wanted = arguments[0] if arguments else None
    for verb, text in VERBS.items():
        if verb == wanted:
            importlib.import_module(f"octavo.cli.{verb}").add_parser(subparsers)
        else:
            subparsers.add_parser(verb, help=text, add_help=False)
    parsed: argparse.Namespace = parser.parse_args(arguments)
    if not hasattr(parsed, "run"):
        parser.print_help()
        return None
    return parsed


def run(parsed: argparse.Namespace) -> int:
    """Runs a parsed verb; errors meant for users become one line on stderr."""
    try:
        status: int = parsed.run(parsed)
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, InvalidRequestError)) else 1
    except OSError as error:
        return failed(error)
    return status


def failed(error: OSError) -> int:
    """The exit status after an error of the system. A reader that has seen enough, as in `octavo doctor | head`, is none."""
    if isinstance(error, BrokenPipeError):
        return 0
    print(f"octavo: {error}", file=sys.stderr)
    return 1


def _version() -> str:
    from octavo import __version__

    return f"octavo {__version__}"


if __name__ == "__main__":
    sys.exit(main())
