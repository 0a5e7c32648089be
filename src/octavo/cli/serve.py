"""`octavo serve [MODEL]`."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli.flags import add_flags, resolve
from octavo.errors import ConfigError

SECTIONS = ("model", "cache", "scheduler", "backend", "structured", "server", "responses")


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("serve", help="serve a model to OpenAI clients")
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="same as --model")
    add_flags(parser, SECTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until told to stop."""
    config = resolve(with_model(arguments))
    from octavo.server.run import serve

    return serve(config)


def with_model(arguments: argparse.Namespace) -> argparse.Namespace:
    """Moves a positional model to where the flag would be. Raises ConfigError when both name different models."""
    positional = arguments.model_positional
    if positional is not None:
        if getattr(arguments, "model", positional) != positional:
            raise ConfigError(
                f"two models are given: {positional} and --model {arguments.model}; give one", param="model"
            )
        arguments.model = positional
    return arguments
