"""The Jinja environment of chat templates: sandboxed, and bounded in time and in what it may build.

Templates come with model files, so they are not trusted: they cannot reach Python, change their input, run for long or
build huge strings. Their clients' messages are only data. Imported when a template is made, because jinja2 is slow to import.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.limits import MAX_RENDERED_CHARACTERS, TEMPLATE_CPU_S

MAX_PADDING = 9_999
"""Largest width that padding and formatting accept."""
MAX_INTEGER_BITS = 4_096

# Names with a space cannot be written in a template.
_TICK, _CONCAT = "octavo tick", "octavo concat"
_TICKS_PER_LOOK = 256
_FORMAT_CHARACTERS = 4_096
_WIDE = re.compile(r"%[-+ #0]*(\d{5}|\d*\.\d{5}|\d*\.?\*)|\{[^{}]*(\d{5}|\{)")


class RaisedByTemplate(jinja2.TemplateError):
    """`raise_exception` was called: the template refuses these messages."""


class RenderLimitError(jinja2.TemplateError):
    """A rendering exceeded its bounds."""


class Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._characters = 0
        self._ticks = 0
        self._end_s = time.thread_time() + TEMPLATE_CPU_S

    def spend(self, characters: int) -> None:
        """Counts a step that puts out so many characters. Raises RenderLimitError beyond the bounds."""
        self._characters += characters
        if self._characters > MAX_RENDERED_CHARACTERS:
            raise RenderLimitError(f"the output exceeds {MAX_RENDERED_CHARACTERS} characters")
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0 and time.thread_time() > self._end_s:
            raise RenderLimitError(f"rendering took more than {TEMPLATE_CPU_S:g} s")


class _Context(jinja2.runtime.Context):
    budget: Budget


class _Generation(Extension):
    """`{% generation %}` marks what assistants wrote, for training. Here its body is simply put out."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Makes loops, macros and string joining count against the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's naming
        return self._count_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._count_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._count_body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        place = {"lineno": node.lineno, "environment": node.environment}
        return nodes.Filter(nodes.List(node.nodes, **place), _CONCAT, [], [], None, None, **place)

    def _count_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        constant = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        place = {"lineno": node.lineno, "environment": node.environment}
        tick = nodes.Filter(nodes.Const(constant, **place), _TICK, [], [], None, None, **place)
        node.body.insert(0, nodes.ExprStmt(tick, **place))
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses operations whose result would be huge before they are carried out."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = _Context

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_length(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise RenderLimitError(f"an integer exceeds {MAX_INTEGER_BITS} bits")
        elif operator == "*":
            sized, count = (right, left) if isinstance(left, int) else (left, right)
            _check_length(_length(sized) * count if isinstance(count, int) else 0)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and args:
            method = getattr(obj, "__name__", "")
            if method == "join":
                args = (list(args[0]), *args[1:])
                _check_joining([part for part in args[0] if isinstance(part, str)], text)
            elif method == "replace" and len(args) >= 2:
                _check_replacing(text, str(args[0]), str(args[1]))
            elif method in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                _check_padding(*args)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template in an environment that gives it what Hugging Face's does. Raises jinja2.TemplateSyntaxError."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        finalize=_put_out,
        cache_size=0,
    )
    environment.filters |= {
        _TICK: _tick,
        _CONCAT: _joined,
        "tojson": _tojson,
        "replace": _replace,
        "join": _join,
        "format": _format,
        "center": _padded(jinja2.filters.do_center),
        "indent": _padded(jinja2.filters.do_indent),
    }
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del environment.globals["lipsum"]
    return environment.from_string(_Instrument().visit(environment.parse(source)))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Renders a template of `compile_template`. Raises jinja2.TemplateError and whatever the template provokes."""
    context = template.new_context(variables)
    assert isinstance(context, _Context)
    context.budget = Budget()
    return _joined(list(template.root_render_func(context)))


# --- what templates call ------------------------------------------------------------------------------------------------


@jinja2.pass_context
def _tick(context: _Context, characters: int) -> None:
    context.budget.spend(characters)


@jinja2.pass_context
def _put_out(context: _Context, value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    context.budget.spend(len(text))
    return text


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    _check_format(pattern)
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    _check_padding(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    _check_replacing(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _joined(parts: Iterable[Any], between: str = "") -> str:
    texts = [str(part) for part in parts]
    _check_joining(texts, between)
    return between.join(texts)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: str | None = None) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return _joined(value, str(d))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    return jinja2.filters.do_format(str(value), *args, **kwargs)


def _padded(function: Callable[..., str]) -> Callable[..., str]:
    def checked(*args: Any, **kwargs: Any) -> str:
        _check_padding(*args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


# --- bounds -------------------------------------------------------------------------------------------------------------


def _length(value: Any) -> int:
    """Size in characters; an item of a list counts as a word."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 0


def _check_length(characters: int) -> None:
    if characters > MAX_RENDERED_CHARACTERS:
        raise RenderLimitError(f"a string exceeds {MAX_RENDERED_CHARACTERS} characters")


def _check_joining(texts: Sequence[str], between: str) -> None:
    _check_length(sum(map(len, texts)) + len(between) * len(texts))


def _check_replacing(text: str, old: str, new: str) -> None:
    _check_length(len(text) + text.count(old) * len(new))


def _check_padding(*values: Any) -> None:
    if any(isinstance(value, int) and value > MAX_PADDING for value in values):
        raise RenderLimitError(f"a width exceeds {MAX_PADDING}")


def _check_format(pattern: str) -> None:
    if len(pattern) > _FORMAT_CHARACTERS or _WIDE.search(pattern):
        raise RenderLimitError(f"a format is longer than {_FORMAT_CHARACTERS} or asks for a width above {MAX_PADDING}")
