"""Chat templates: messages to the text of a prompt, and on to its token ids. Knows no HTTP and no sampling."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequestError, ModelFileError, UnsupportedFieldError
from octavo.limits import MAX_NESTING, MAX_TEMPLATE_CHARACTERS, is_deeper
from octavo.text.generic_tools import describe_tools, spell_calls
from octavo.text.guard import any_string, map_strings, unmarked
from octavo.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

RESERVED_KWARGS = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "bos_token",
        "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now", "conversation", "return_tensors",
        "return_dict", "padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask",
        "range", "dict", "namespace", "cycler", "joiner", "self", "loop", "caller", "context", "environment",
    }
)  # fmt: skip
"""Names that requests may not pass to a template: they are its own, or options of the functions around it."""

_ASSISTANT_TEXT = frozenset({"content", "reasoning", "reasoning_content", "thinking"})


class ChatTemplate:
    """A model's chat template, compiled once. May be rendered from several threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Mapping[str, str] | None = None,
        default_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`special_tokens`: further variables a template may use, such as unk_token. `default_kwargs`: template arguments
        of requests that do not set them.

        Raises InvalidRequestError for defaults with reserved names, ModelFileError saying where the template is wrong:
        such a model still serves completions.
        """
        import jinja2

        from octavo.text import sandbox

        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelFileError(
                f"the chat template exceeds {MAX_TEMPLATE_CHARACTERS} characters", param="chat_template"
            )
        self.source = source
        self._defaults = dict(default_kwargs or {})
        _checked_variables(None, self._defaults)
        self._knows_developer = self.mentions("developer")
        self._constants = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        try:
            self._compiled = sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}", param="chat_template"
            ) from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFileError(f"the chat template cannot be compiled: {error}", param="chat_template") from error

    def mentions(self, name: str) -> bool:
        """Whether the template looks at a variable of this name, as far as its text tells."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Messages as in `normalize_messages`; `kwargs` are the request's chat_template_kwargs.

        `continue_final_message` ends the prompt inside the last message, for the model to go on with it.
        Raises InvalidRequestError for bad messages and whenever the template refuses or cannot render them.
        """
        normal = self.adapted(normalize_messages(messages))
        variables = self.variables(tools, kwargs)
        return self._render(normal, variables, add_generation_prompt, continue_final_message)

    def adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages in roles that the template knows: OpenAI's developer is a system message to templates from before it."""
        if self._knows_developer:
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def variables(self, tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the template sees beside the messages. Raises InvalidRequestError for reserved names and deep nesting."""
        return _checked_variables(tools, {**self._defaults, **(kwargs or {})})

    def _render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        if not continue_final_message:
            return self._run(messages, variables, add_generation_prompt)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt to false",
                param="continue_final_message",
            )
        # Where the last message's text ends is only known by what follows it, so something unmistakable has to.
        end = f"end-{secrets.token_hex(16)}"
        *before, last = messages
        extended = {**last, "content": f"{last['content']} {end} "}
        head, found, tail = self._run([*before, extended], variables, add_generation_prompt).rpartition(end)
        if not found:
            raise InvalidRequestError(
                "the chat template does not show the last message, so it cannot be continued",
                param="continue_final_message",
            )
        # A template that trims content takes the space after it, and would have taken those of the text itself.
        return head.removesuffix(" ") if tail.startswith(" ") else head.rstrip()

    def _run(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        import jinja2

        from octavo.text import sandbox

        try:
            return sandbox.render(
                self._compiled,
                {
                    **variables,
                    **self._constants,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except sandbox.RaisedByTemplate as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except sandbox.RenderLimitError as error:
            raise InvalidRequestError(f"the chat template exceeds its bounds: {error}", param="messages") from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation and its ids."""

    text: str
    token_ids: list[int]


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Messages to the prompt of a model.

    Control tokens stand only where the template put them: what clients send (content, names, tool results, arguments, tools,
    template arguments) is ordinary text, even where it reads like one. Text of an assistant's own turns may hold tokens that the
    template writes but that are not control tokens by the model's own list (<think>), since templates look for them.
    One BOS begins the prompt of a model that has one. Tools that the template does not know of are told and called in plain text
    (`generic_tools`). Raises InvalidRequestError.
    """
    normal = template.adapted(normalize_messages(messages))
    if tools and not template.mentions("tools"):
        normal, tools = describe_tools(normal, tools), None
    if not template.mentions("tool_calls"):
        normal = spell_calls(normal)
    variables = template.variables(tools, kwargs)
    guard, own_guard = tokenizer.chat_guard(template.source), tokenizer.control_guard
    marked = any_string(variables, guard.finds) or any(
        any_string(value, (own_guard if _is_assistants_own(message, name) else guard).finds)
        for message in normal
        for name, value in message.items()
    )
    if marked:
        variables = map_strings(variables, guard.protect)
        normal = [
            {
                name: map_strings(value, (own_guard if _is_assistants_own(message, name) else guard).protect)
                for name, value in message.items()
            }
            for message in normal
        ]
    text = template._render(normal, variables, add_generation_prompt, continue_final_message)
    token_ids = tokenizer.encode_chat(text, marked=marked)
    return ChatPrompt(unmarked(text) if marked else text, token_ids)


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one form templates are written for.

    Text parts are joined, an assistant's absent content is "", arguments of tool calls are objects (empty text is {}, text that is no
    JSON object stays text), empty lists of tool calls and null fields are left out. The input is not changed.
    Raises InvalidRequestError naming the field, UnsupportedFieldError for parts that are no text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", param="messages")
    return [_normal_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normal_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{place} must be an object with role and content", param=place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{place}.role is {role!r:.40}, expected one of {', '.join(sorted(ROLES))}", param=f"{place}.role"
        )
    normal = {name: value for name, value in message.items() if value is not None}
    if is_deeper(normal, MAX_NESTING):
        raise InvalidRequestError(f"{place} is nested more than {MAX_NESTING} levels deep", param=place)
    normal["content"] = _text(message.get("content"), f"{place}.content", absent_is_empty=role == "assistant")
    if "tool_calls" in normal:
        calls = normal.pop("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise InvalidRequestError(f"{place}.tool_calls must be a list of objects", param=f"{place}.tool_calls")
        if calls:
            normal["tool_calls"] = [
                _normal_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)
            ]
    return normal


def _text(content: Any, place: str, *, absent_is_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None or content == []:
        if absent_is_empty:
            return ""
        raise InvalidRequestError(f"{place} is missing; expected text or a list of text parts", param=place)
    if not isinstance(content, list):
        raise InvalidRequestError(f"{place} must be text or a list of text parts", param=place)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidRequestError(f"{place}[{index}] must be an object with a type", param=f"{place}[{index}]")
        if kind not in ("text", "refusal"):
            raise UnsupportedFieldError(
                f"{place}[{index}].type {kind!r:.40} is not supported; only text parts are",
                param=f"{place}[{index}].type",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidRequestError(f"{place}[{index}].{kind} must be a string", param=f"{place}[{index}].{kind}")
        texts.append(text)
    return "".join(texts)


def _normal_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{place}.function must be an object with a name", param=f"{place}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, Mapping, type(None))):
        raise InvalidRequestError(
            f"{place}.function.arguments must be the text of a JSON object", param=f"{place}.function.arguments"
        )
    given = {} if arguments is None else _arguments(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": given}}


def _arguments(text: str) -> Any:
    """Arguments as templates want them: an object."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and not is_deeper(value, MAX_NESTING) else text


def _checked_variables(tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in kwargs or {}:
        if name in RESERVED_KWARGS or name.startswith("_"):
            raise InvalidRequestError(
                f"chat_template_kwargs.{name:.60} is a reserved name", param=f"chat_template_kwargs.{name:.60}"
            )
    variables = {"documents": None, **(kwargs or {}), "tools": list(tools) if tools else None}
    for name, value in variables.items():
        if is_deeper(value, MAX_NESTING):
            place = "tools" if name == "tools" else f"chat_template_kwargs.{name:.60}"
            raise InvalidRequestError(f"{place} is nested more than {MAX_NESTING} levels deep", param=place)
    return variables


def _is_assistants_own(message: Mapping[str, Any], name: str) -> bool:
    return message["role"] == "assistant" and name in _ASSISTANT_TEXT
