"""`octavo pull NAME`: fetches a model before it is needed, and says where it is."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from octavo.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("pull", help="fetch a model", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="catalogue name, or Hugging Face repository id")
    parser.add_argument("--list", action="store_true", help="list the catalogue instead")
    parser.add_argument(
        "--verify", action="store_true", help="check a cached catalogue model's SHA-256, fetch it again if wrong"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face repository")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the path on stdout; progress goes to stderr. Raises what the loaders raise."""
    from octavo.loaders import catalogue

    if arguments.list == (arguments.name is not None):
        raise ConfigError("give either a NAME or --list")
    if arguments.list:
        for entry in catalogue.CATALOGUE.values():
            print(f"{entry.name:<16} {entry.size / 2**20:>7.0f} MiB  {entry.licence:<12} {entry.description}")
        return 0
    if "/" in arguments.name and arguments.name not in catalogue.CATALOGUE:
        print(_pull_repository(arguments))
        return 0
    if arguments.revision is not None:
        raise ConfigError("--revision applies to Hugging Face repositories, not to catalogue models", param="revision")
    print(catalogue.ensure(arguments.name, verify=arguments.verify))
    return 0


def _pull_repository(arguments: argparse.Namespace) -> str:
    from octavo.loaders.checkpoint import open_checkpoint

    if arguments.verify:
        raise ConfigError(
            "--verify applies to catalogue models; the hub's cache checks what it downloads", param="verify"
        )
    checkpoint = open_checkpoint(arguments.name, revision=arguments.revision)
    if checkpoint.unsupported:
        name, kind = next(iter(checkpoint.unsupported.items()))
        print(f"note: has tensors of types that octavo does not compute with, such as {name} ({kind})", file=sys.stderr)
    return str(checkpoint.path)
