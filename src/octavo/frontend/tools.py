"""What a conversation's answer may be: calls of which tools, after reasoning or not, in which form, and how it is read.

The one place where tools, the model's formats, grammars and parsers meet. Knows no HTTP and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import InvalidRequestError, UnsupportedFieldError
from octavo.grammar import CallsSpec, GrammarKind, GrammarSpec, Reasoning, ToolSpec
from octavo.limits import MAX_SCHEMA_BYTES, MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS

if TYPE_CHECKING:
    from octavo.frontend.model import ServedModel
    from octavo.text.calls import Router

_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}")
_THINK, _THINK_END = "<think>", "</think>"


class Calling(Enum):
    """Whether an answer calls tools. NONE: no. AUTO: the model decides. REQUIRED: it is calls. NAMED: it is one call of one tool."""

    NONE = auto()
    AUTO = auto()
    REQUIRED = auto()
    NAMED = auto()


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of a request, checked. `given` are all of them as the template gets them, `callable` those that may be called."""

    given: tuple[Mapping[str, Any], ...]
    callable: tuple[ToolSpec, ...]
    calling: Calling
    parallel: bool = True

    @property
    def told(self) -> tuple[Mapping[str, Any], ...]:
        """What the model is told of: nothing where nothing may be called."""
        return () if self.calling is Calling.NONE else self.given


NO_TOOLS = Tools((), (), Calling.NONE)


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is constrained and read.

    `call_format`: the model's, when tools may be called. `reasoning`: whether reasoning comes, or may come, first; None where it is not
    told apart.
    """

    tools: Tools = NO_TOOLS
    call_format: str | None = None
    constrains_auto: bool = False
    form: GrammarSpec | None = None
    reasoning_format: str | None = None
    reasoning: Reasoning | None = None

    def after(self, prompt: str, continued: str) -> Reading:
        """The same once the prompt is known: it may have begun, or ended, the reasoning. `continued`: what the answer goes on with."""
        from octavo.text.calls import REASONING_FORMATS

        if self.reasoning_format is None:
            return self
        end = prompt.rstrip()
        if end.endswith(_THINK) or continued.rfind(_THINK) > continued.rfind(_THINK_END):
            return replace(self, reasoning=Reasoning.BEGUN)
        if end.endswith(_THINK_END) or _THINK_END in continued:
            return self
        begun = REASONING_FORMATS[self.reasoning_format]
        return replace(self, reasoning=Reasoning.BEGUN if begun else Reasoning.POSSIBLE)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be control tokens and that reading needs to see."""
        from octavo.text.calls import CALL_FORMATS, ReasoningParser

        calls = CALL_FORMATS[self.call_format].markers if self.call_format else ()
        return (*calls, *(ReasoningParser.markers if self.reasoning else ()))

    @property
    def grammar(self) -> GrammarSpec | None:
        """What constrains the answer, if anything does. Raises InvalidRequestError."""
        spec = self._calls_grammar() if self.call_format else self.form
        if spec is None or self.reasoning is None:
            return spec
        return msgspec.structs.replace(spec, reasoning=self.reasoning)

    def router(self) -> Router | None:
        """Reads one choice; None where all of it is content."""
        from octavo.text.calls import CALL_FORMATS, ReasoningParser, Router

        if self.call_format is None and self.reasoning is None:
            return None
        reasoning = None if self.reasoning is None else ReasoningParser(begun=self.reasoning is Reasoning.BEGUN)
        if self.call_format is None:
            return Router(reasoning, None)
        schemas = {tool.name: tool.parameters for tool in self.tools.callable}
        most_calls = None if self.tools.parallel else 1
        return Router(reasoning, CALL_FORMATS[self.call_format](schemas, most_calls=most_calls))

    def _calls_grammar(self) -> GrammarSpec | None:
        tools = self.tools
        required = tools.calling is not Calling.AUTO
        if required and self.form is not None:
            raise InvalidRequestError(
                f"tool_choice and {self.form.field} exclude each other: the answer is either a call or in that form",
                param="tool_choice",
            )
        if not (required or self.constrains_auto or self.form is not None):
            return None
        assert self.call_format is not None
        calls = CallsSpec(
            format=self.call_format,
            tools=tools.callable,
            required=required,
            parallel=tools.parallel and tools.calling is not Calling.NAMED,
            content=self.form,
        )
        return GrammarSpec(kind=GrammarKind.CALLS, text=msgspec.json.encode(calls).decode(), field="tools")


PLAIN = Reading()
"""All of an answer is content."""


def reading_of(model: ServedModel, tools: Tools, form: GrammarSpec | None) -> Reading:
    """How answers to such a request are read. Raises InvalidRequestError when the model's format of calls is not known."""
    reading = Reading(form=form, reasoning_format=model.reasoning_format)
    if tools.calling is Calling.NONE:
        return reading
    if model.call_format is None:
        raise InvalidRequestError(
            "tools: the format in which this model calls tools cannot be told from its chat template; start the server with "
            "--tool-call-parser",
            param="tools",
        )
    return replace(reading, tools=tools, call_format=model.call_format, constrains_auto=model.constrains_auto_calls)


def parse_tools(tools: Any, tool_choice: Any, parallel: Any) -> Tools:
    """Checks OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidRequestError, UnsupportedFieldError."""
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequestError("parallel_tool_calls must be true or false", param="parallel_tool_calls")
    given = _tools(tools)
    specs = {tool["function"]["name"]: _spec(tool["function"]) for tool in given}
    if len(specs) < len(given):
        raise InvalidRequestError("tools: two of them have the same name", param="tools")
    if not given:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return NO_TOOLS
    calling, names = _choice(tool_choice, list(specs))
    return Tools(given, tuple(specs[name] for name in names), calling, parallel is not False)


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequestError("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise UnsupportedFieldError(f'{place}.type is {kind!r:.60}; expected "function"', param="tools")
        _check_function(tool.get("function"), f"{place}.function")
    return tuple(tools)


def _check_function(function: Any, place: str) -> None:
    def wrong(what: str) -> InvalidRequestError:
        return InvalidRequestError(f"{place}{what}", param="tools")

    if not isinstance(function, Mapping):
        raise wrong(" must be an object with a name")
    if unknown := sorted(set(map(str, function)) - {"name", "description", "parameters", "strict"}):
        raise UnsupportedFieldError(f"{place} has the unknown field {unknown[0]!r:.60}", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f".name must be 1 to {MAX_TOOL_NAME_CHARACTERS} letters, digits, underscores and dashes")
    if not isinstance(function.get("description"), (str, type(None))):
        raise wrong(".description must be a text")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise wrong(".strict must be true or false")
    parameters = function.get("parameters")
    if not isinstance(parameters, (Mapping, type(None))):
        raise wrong(".parameters must be a JSON schema, an object")
    try:
        size = len(msgspec.json.encode(function))
    except (TypeError, ValueError, RecursionError) as error:
        raise wrong(f" cannot be written as JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise wrong(f" has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed")


def _spec(function: Mapping[str, Any]) -> ToolSpec:
    parameters = function.get("parameters")
    return ToolSpec(
        name=function["name"],
        parameters=None if parameters is None else dict(parameters),
        strict=bool(function.get("strict")),
    )


def _choice(choice: Any, names: list[str]) -> tuple[Calling, list[str]]:
    """What may be called."""
    words = {None: Calling.AUTO, "auto": Calling.AUTO, "none": Calling.NONE, "required": Calling.REQUIRED}
    if choice is None or isinstance(choice, str):
        if choice not in words:
            raise InvalidRequestError(
                f"tool_choice is {choice!r:.60}; expected none, auto, required or an object that names a tool",
                param="tool_choice",
            )
        return words[choice], names
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return Calling.NAMED, [_named(choice, names)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise InvalidRequestError("tool_choice.allowed_tools needs a mode and a list of tools", param="tool_choice")
        return words[mode], list(dict.fromkeys(_named(tool, names) for tool in tools))
    raise InvalidRequestError(
        'tool_choice must be a word, {"type": "function", "function": {"name": ...}} or of type allowed_tools',
        param="tool_choice",
    )


def _named(choice: Any, names: list[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError("tool_choice.function.name must be the name of a tool", param="tool_choice")
    if name not in names:
        raise InvalidRequestError(f"tool_choice names {name!r:.80}, which is none of the tools", param="tool_choice")
    return name
