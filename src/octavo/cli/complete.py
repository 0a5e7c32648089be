"""`octavo complete TEXT`: continue a text, with a model loaded here or served elsewhere (`--url`)."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from octavo.cli.chat import SECTIONS, add_talk_flags, sampling_of, talker_of
from octavo.cli.flags import add_flags
from octavo.cli.talk import show


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("complete", help="continue a text", description=__doc__)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the text to continue; without it, standard input")
    add_talk_flags(parser)
    add_flags(parser, SECTIONS)
    parser.set_defaults(run=run, model_positional=None)


def run(arguments: argparse.Namespace) -> int:
    """Prints the continuation as it comes."""
    prompt = arguments.text if arguments.text is not None else sys.stdin.read()
    with talker_of(arguments) as talker:
        show(talker.complete(prompt, {"max_tokens": 128, **sampling_of(arguments)}))
    print()
    return 0
