"""Command-line flags and environment variables from the fields of `octavo.config`.

A field `max_num_seqs` is the flag `--max-num-seqs`, the variable `OCTAVO_MAX_NUM_SEQS`, and may stand in a `.env` file. A flag wins over
the environment, which wins over `.env`, which wins over the default. Names are vLLM's; a vLLM flag that octavo does not have
is refused by name.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from octavo.config import Config, Help, Section
from octavo.errors import ConfigError

_log = logging.getLogger("octavo")

_ALIASES = {"VLLM_API_KEY": "api_key", "VLLM_HOST": "host", "VLLM_PORT": "port"}

# Flags of `vllm serve` that people may bring along and that octavo does not have (yet).
_VLLM_FLAGS = frozenset(
    """--tokenizer --quantization --load-format --seed --trust-remote-code --hf-overrides --override-generation-config --enforce-eager
    --logprobs-mode --enable-sleep-mode --kv-cache-dtype --prefix-caching-hash-algo --kv-offloading-size --kv-offloading-backend
    --cpu-offload-gb --swap-space --max-num-active-seqs --long-prefill-token-threshold --prefill-schedule-interval --scheduling-policy
    --async-scheduling --stream-interval --scheduler-reserve-full-isl --watermark --scheduler-cls --max-num-queued-tokens
    --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --enable-expert-parallel --distributed-executor-backend --nnodes
    --node-rank --numa-bind --enable-lora --max-loras --max-lora-rank --max-cpu-loras --lora-modules --structured-outputs-config
    --guided-decoding-backend --reasoning-parser --enable-auto-tool-choice --tool-call-parser --tool-parser-plugin --tool-server
    --default-chat-template-kwargs --trust-request-chat-template --speculative-config --spec-method --spec-model --spec-tokens
    --kv-transfer-config --kv-events-config --otlp-traces-endpoint --collect-detailed-traces --kv-cache-metrics --enable-mfu-metrics
    --disable-log-stats --enable-log-requests --enable-log-outputs --enable-prompt-tokens-details --uds --ssl-keyfile --ssl-certfile
    --allowed-origins --root-path --middleware --enable-request-id-headers --api-server-count --headless --grpc-port
    --sse-keep-alive-interval --config --optimization-level --performance-mode --compilation-config --admin-api-key --allowed-hosts
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
    for section in sections:
        group = parser.add_argument_group(section)
        for field in _fields([section]):
            if field.name in without:
                continue
            options: dict[str, Any] = {
                "dest": field.name,
                "default": argparse.SUPPRESS,
                "help": field.help.text.replace("%", "%%"),
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


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
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
            given.setdefault(field.section, {})[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.name in variables:
            source, text = variables[field.name]
            given.setdefault(field.section, {})[field.name] = _parse(field, source, text)
    sections: dict[str, Section] = {}
    for section, values in given.items():
        kind = typing.get_type_hints(Config)[section]
        try:
            sections[section] = msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{section}: {error}") from None
    return Config(**sections)  # type: ignore[arg-type]


def _variables(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Field name -> (variable, text). The environment wins over `.env`, `OCTAVO_` over an alias."""
    known = {field.name for field in _fields(Config.__struct_fields__)}
    found: dict[str, tuple[str, str]] = {}
    for source in (environment, _dot_env()):
        by_field: dict[str, tuple[str, str]] = {}
        for variable, text in source.items():
            if variable in _ALIASES:
                if variable == "VLLM_PORT" and text.startswith("tcp://"):
                    _log.warning(
                        "VLLM_PORT=%s looks injected by Kubernetes for a service named vllm and is ignored", text
                    )
                    continue
                by_field.setdefault(_ALIASES[variable], (variable, text))
        for variable, text in source.items():
            name = variable.removeprefix("OCTAVO_").lower()
            if variable.startswith("OCTAVO_") and name in known:
                by_field[name] = (variable, text)
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
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            result[name.strip()] = value
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
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            value = type(choices[0])(text)
            if value not in choices:
                raise ValueError(f"expected one of {', '.join(map(str, choices))}")
            return value
        return kind(text)
    except ValueError as error:
        shown = "(secret)" if field.help.secret else repr(text)
        raise ConfigError(f"{source} is {shown}: {error}; see {field.flag}", param=field.name) from None


class Parser(argparse.ArgumentParser):
    """argparse whose unknown flags are answered by name: a vLLM flag that octavo lacks, or a near miss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses all arguments or exits with status 2 and one line."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((part for part in unknown if part.startswith("-")), unknown[0]).partition("=")[0]
        if flag in _VLLM_FLAGS or "--" + flag.removeprefix("--no-") in _VLLM_FLAGS:
            self.error(f"{flag} is a flag of vLLM that octavo does not have; remove it")
        near = difflib.get_close_matches(flag, [field.flag for field in _fields(Config.__struct_fields__)], n=1)
        self.error(f"unknown argument {flag}" + (f"; did you mean {near[0]}?" if near else ""))
