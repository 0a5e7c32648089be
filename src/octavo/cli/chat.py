"""`octavo chat [MODEL]`: talk to a model in the terminal, loaded here or served elsewhere (`--url`)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from typing import Any

from octavo.cli.flags import add_flags, given_flags, resolve
from octavo.cli.serve import with_model
from octavo.cli.talk import LocalTalker, RemoteTalker, Talker, show
from octavo.errors import ConfigError

SECTIONS = ("model", "cache", "backend")


def add_parser(subparsers: Any) -> None:
    """Adds the verb."""
    parser = subparsers.add_parser("chat", help="talk to a model in the terminal", description=__doc__)
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send one message, print the answer, and end")
    add_talk_flags(parser)
    add_flags(parser, SECTIONS)
    parser.set_defaults(run=run)


def add_talk_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `chat` and `complete` share."""
    parser.add_argument("--url", metavar="URL", help="use a running server instead of loading a model here")
    parser.add_argument("--api-key", metavar="KEY", dest="key", help="key for --url")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 always takes the most likely token")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling values that were given."""
    names = ("max_tokens", "temperature", "seed")
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


@contextlib.contextmanager
def talker_of(arguments: argparse.Namespace) -> Any:
    """The source of text that the flags ask for. Raises ConfigError for flags of the other source."""
    arguments = with_model(arguments)
    if arguments.url is not None:
        if idle := [flag for flag in given_flags(arguments, SECTIONS) if flag != "--model"]:
            raise ConfigError(
                f"{idle[0]} is for a model loaded here; with --url the server decides: remove one of them"
            )
        yield RemoteTalker(arguments.url, arguments.key, getattr(arguments, "model", None))
        return
    if arguments.key is not None:
        raise ConfigError("--api-key is for --url; a model loaded here needs none", param="api_key")
    logging.getLogger("octavo").setLevel(logging.WARNING)
    with LocalTalker(resolve(arguments)) as talker:
        yield talker


def run(arguments: argparse.Namespace) -> int:
    """Talks until end of input. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    messages: list[dict[str, str]] = []
    if arguments.system_prompt:
        messages.append({"role": "system", "content": arguments.system_prompt})
    with talker_of(arguments) as talker:
        if arguments.quick is not None:
            _answer(talker, [*messages, {"role": "user", "content": arguments.quick}], arguments)
            return 0
        if sys.stdin.isatty():
            print("Ctrl-C stops an answer, Ctrl-D ends.")
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt) as end:
                if sys.stdin.isatty():
                    print()
                if isinstance(end, KeyboardInterrupt):
                    raise
                return 0
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            answer = _answer(talker, messages, arguments)
            messages.append({"role": "assistant", "content": answer})


def _answer(talker: Talker, messages: list[dict[str, str]], arguments: argparse.Namespace) -> str:
    answer = show(talker.chat(messages, sampling_of(arguments)), interruptible=sys.stdin.isatty())
    print()
    return answer
