"""Command-line flags and environment variables from the fields of `octavo.config`.

A field `max_num_seqs` is the flag `--max-num-seqs`, the variable `OCTAVO_MAX_NUM_SEQS`, and may stand in a `.env` file. A flag wins over
the environment, which wins over `.env`, which wins over the default. Names are vLLM's; a vLLM flag that octavo does not have
is refused by name. As with vLLM, `--max_num_seqs` is the same flag.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import math
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from octavo.cli.hide import hide_arguments
from octavo.config import Config, Help, Section
from octavo.errors import ConfigError

_log = logging.getLogger("octavo")

_ALIASES = {
    "VLLM_API_KEY": "api_key",
    "VLLM_HOST": "host",
    "VLLM_PORT": "port",
    "VLLM_ENABLE_RESPONSES_API_STORE": "responses_store",
}
_OTHER_VARIABLES = ("OCTAVO_HOME", "OCTAVO_ISA")
"""Read elsewhere: where models are kept, and the instruction set to use."""

# Flags of `vllm serve` that people may bring along and that octavo does not have (yet).
_VLLM_FLAGS = frozenset(
    """--tokenizer --quantization --load-format --seed --trust-remote-code --hf-overrides --override-generation-config --enforce-eager
    --logprobs-mode --enable-sleep-mode --prefix-caching-hash-algo --kv-offloading-size --kv-offloading-backend
    --cpu-offload-gb --swap-space --max-num-active-seqs --prefill-schedule-interval
    --async-scheduling --stream-interval --scheduler-reserve-full-isl --watermark --scheduler-cls --max-num-queued-tokens
    --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --enable-expert-parallel --distributed-executor-backend --nnodes
    --node-rank --numa-bind --enable-lora --max-loras --max-lora-rank --max-cpu-loras --lora-modules --structured-outputs-config
    --guided-decoding-backend --tool-parser-plugin --tool-server
    --trust-request-chat-template --speculative-config --spec-method --spec-model --spec-tokens
    --kv-transfer-config --kv-events-config --otlp-traces-endpoint --collect-detailed-traces --kv-cache-metrics --enable-mfu-metrics
    --disable-log-stats --enable-log-outputs --max-log-len --enable-prompt-tokens-details --uds --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers
    --enable-ssl-refresh --root-path --middleware --enable-request-id-headers --api-server-count --headless --grpc-port
    --sse-keep-alive-interval --config --optimization-level --performance-mode --compilation-config --admin-api-key
    --device --max-seq-len-to-capture --num-gpu-blocks-override --worker-cls --response-role""".split()
)


class _Field(typing.NamedTuple):
    section: str
    name: str
    type: Any
    help: Help

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _fields(sections: Sequence[str]) -> Iterator[_Field]:
    for section in sections:
        kind = typing.get_type_hints(Config)[section]
        for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
            base, *extras = typing.get_args(annotation)
            yield _Field(section, name, base, next(extra for extra in extras if isinstance(extra, Help)))


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[str], *, without: Sequence[str] = ()) -> None:
    """Adds the flags of some sections of `Config`. Absent flags leave no attribute, so that environment and defaults can follow."""
    parser.epilog = (
        f"Each flag of {', '.join(sections)} is also a variable, such as OCTAVO_MAX_NUM_SEQS for --max-num-seqs, in the environment or "
        "in a file .env of the working folder."
    )
    for section in sections:
        group = parser.add_argument_group(section)
        for field in _fields([section]):
            if field.name in without:
                continue
            options: dict[str, Any] = {
                "dest": field.name,
                "default": argparse.SUPPRESS,
                "help": _help_text(field).replace("%", "%%"),
            }
            kind = _without_none(field.type)
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif typing.get_origin(kind) is tuple:
                options.update(nargs="+", action="extend", metavar=field.help.metavar or "VALUE")
            elif typing.get_origin(kind) is Literal:
                choices = typing.get_args(kind)
                options.update(choices=choices, type=type(choices[0]))
            else:
                options.update(type=kind, metavar=field.help.metavar or {int: "N", float: "X", str: "TEXT"}[kind])
            group.add_argument(field.flag, *field.help.aliases, **options)
            if field.help.opposite:
                group.add_argument(
                    field.help.opposite,
                    action="store_false",
                    dest=field.name,
                    default=argparse.SUPPRESS,
                    help=f"the opposite of {field.flag}",
                )


def given_flags(arguments: argparse.Namespace, sections: Sequence[str]) -> list[str]:
    """The flags of these sections that the command line holds."""
    return [field.flag for field in _fields(sections) if hasattr(arguments, field.name)]


def _help_text(field: _Field) -> str:
    default = getattr(getattr(Config(), field.section), field.name)
    if default is None or default == () or "default" in field.help.text:
        return field.help.text
    return f"{field.help.text} (default: {('off', 'on')[default] if isinstance(default, bool) else default})"


def _without_none(kind: Any) -> Any:
    if (
        isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    ):  # the latter of Literal[...] | None
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def resolve(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration of a command line: flags, then environment, then `.env` in the working folder, then defaults.

    Raises ConfigError that names the variable for a value that does not fit.
    """
    variables = _variables(os.environ if environment is None else environment)
    given: dict[str, dict[str, Any]] = {}
    for field in _fields(Config.__struct_fields__):
        if hasattr(arguments, field.name):
            value: Any = getattr(arguments, field.name)
            source, value = field.flag, _listed(value) if isinstance(value, list) else value
            if field.help.secret and value:
                hide_arguments(value if isinstance(value, tuple) else (value,))
        elif field.name in variables:
            source, text = variables[field.name]
            value = _parse(field, source, text)
        else:
            continue
        _check(field, source, value)
        given.setdefault(field.section, {})[field.name] = value
    sections: dict[str, Section] = {}
    for section, values in given.items():
        kind = typing.get_type_hints(Config)[section]
        try:
            sections[section] = msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{section}: {error}") from None
    return Config(**sections)  # type: ignore[arg-type]


def _variables(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Field name -> (variable, text). The environment wins over `.env`, `OCTAVO_` over an alias.

    A variable that is nearly one of ours is warned about. It is no error, because others may set what they like.
    """
    known = {field.name for field in _fields(Config.__struct_fields__)}
    found: dict[str, tuple[str, str]] = {}
    for source in (environment, _dot_env()):
        by_field: dict[str, tuple[str, str]] = {}
        ours = {
            variable: text
            for variable, text in source.items()
            if variable in _ALIASES or variable.startswith("OCTAVO_")
        }
        for variable in ("VLLM_PORT", "OCTAVO_PORT"):
            if ours.get(variable, "").startswith("tcp://"):
                service = variable.partition("_")[0].lower()
                _log.warning(
                    "%s=%s looks injected by Kubernetes for a service named %s and is ignored",
                    variable,
                    ours.pop(variable),
                    service,
                )
        for variable, text in ours.items():
            if variable in _ALIASES:
                by_field.setdefault(_ALIASES[variable], (variable, text))
        for variable, text in ours.items():
            if variable.startswith("OCTAVO_"):
                if (name := variable.removeprefix("OCTAVO_").lower()) in known:
                    by_field[name] = (variable, text)
                elif near := _near(variable, [f"OCTAVO_{name.upper()}" for name in known], besides=_OTHER_VARIABLES):
                    _log.warning("the variable %s is not known; did you mean %s?", variable, near)
        for name, value in by_field.items():
            found.setdefault(name, value)
    return found


def _dot_env() -> dict[str, str]:
    """`KEY=VALUE` lines of `.env`; comments, `export` and quotes as shells allow them. Other programs' keys are left alone."""
    path = Path(".env")
    if not path.is_file():
        return {}
    result: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and not name.startswith("#"):
            value = value.strip()
            quoted = re.fullmatch(r"""(["'])(.*?)\1(?:\s+#.*)?""", value)
            result[name.strip()] = quoted[2] if quoted else re.split(r"(?:^|\s+)#", value, maxsplit=1)[0]
    return result


def _parse(field: _Field, source: str, text: str) -> Any:
    kind = _without_none(field.type)
    try:
        if kind is bool:
            lowered = text.strip().lower()
            if lowered in ("1", "true", "yes", "on"):
                return True
            if lowered in ("0", "false", "no", "off"):
                return False
            raise ValueError("expected true or false")
        if typing.get_origin(kind) is tuple:
            if text.lstrip().startswith("["):
                return _listed([text])
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            value = type(choices[0])(text)
            if value not in choices:
                raise ValueError(f"expected one of {', '.join(map(str, choices))}")
            return value
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"expected a {'whole ' if kind is int else ''}number") from None
        return text
    except ValueError as error:
        shown = "(secret)" if field.help.secret else repr(text)
        raise ConfigError(f"{source} is {shown}: {error}; see {field.flag}", param=field.name) from None


def _listed(values: Sequence[str]) -> tuple[str, ...]:
    """The values of a flag that may be repeated. vLLM's own form, a JSON list such as '["*"]', is taken apart."""
    items: list[str] = []
    for value in values:
        try:
            inner = json.loads(value) if value.lstrip().startswith("[") else None
        except ValueError:
            inner = None
        items += inner if isinstance(inner, list) and all(isinstance(item, str) for item in inner) else [value]
    return tuple(items)


def _check(field: _Field, source: str, value: Any) -> None:
    """Refuses numbers outside a field's bounds, and empty names. Raises ConfigError."""
    low, high = field.help.low, field.help.high
    if low is not None and value is not None and not low <= value <= (math.inf if high is None else high):
        bounds = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        raise ConfigError(f"{source} is {value}; it must be {bounds}", param=field.name)
    if value in ("", ()) or (isinstance(value, tuple) and "" in value):
        raise ConfigError(f"{source} is empty", param=field.name)


def _near(word: str, words: Sequence[str], besides: Sequence[str] = ()) -> str | None:
    """What was probably meant; None where nothing is near, or the word is right as one of `besides`."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return near[0] if near and word not in besides else None


def duration(text: str) -> float:
    """argparse type of times: a finite number that is not negative."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose unknown flags are answered by name: a vLLM flag that octavo lacks, or a near
    miss.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses all arguments or exits with status 2 and one line; also called by argparse for the arguments of a verb."""
        arguments = [_dashed(argument) for argument in (sys.argv[1:] if args is None else args)]
        parsed, unknown = super().parse_known_args(arguments, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exits with status 2 and one line."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((part for part in unknown if part.startswith("-")), unknown[0]).partition("=")[0]
        if flag in _VLLM_FLAGS or "--" + flag.removeprefix("--no-") in _VLLM_FLAGS:
            self.error(f"{flag} is a flag of vLLM that octavo does not have: remove it")
        near = _near(flag, list(self._option_string_actions))
        self.error(f"unknown argument {flag}" + (f" (did you mean {near}?)" if near else ""))


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
