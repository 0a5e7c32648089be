"""Anthropic's SDK, and OpenAI's for Responses, against a live server. `scripts/clients.py` has further clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import anthropic
import openai
import pydantic
import pytest

from support.live import Live, live

pytestmark = pytest.mark.filterwarnings("default")  # of libraries that are not ours

MODEL = "smollm2-135m"


class City(pydantic.BaseModel):
    """A city, small enough for a small model."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Annotated[str, pydantic.Field(max_length=12)]
    inhabitants: Annotated[int, pydantic.Field(ge=0, le=9_999_999)]
    coast: bool


# --- Anthropic ------------------------------------------------------------------------------------------------------


@pytest.fixture
def claude(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "Name a colour."}]}


def test_anthropic_whole_equals_stream(claude: anthropic.Anthropic) -> None:
    options = {**ASK, "extra_body": {"temperature": 0}, "system": "Be brief."}
    whole = claude.messages.create(**options)
    assert whole.content[0].type == "text"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.content[0].type == "text"
    assert final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=options["messages"], system="Be brief.")
    total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == total


def test_anthropic_tools_and_results(claude: anthropic.Anthropic) -> None:
    tools: Any = [
        {"name": "remember_city", "description": "Remembers a city", "input_schema": City.model_json_schema()}
    ]
    options: Any = {
        **ASK,
        "max_tokens": 150,
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    with claude.messages.stream(**options) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    City.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "remembered"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(
        **{**ASK, "messages": messages, "tools": tools, "tool_choice": {"type": "none"}}
    ).content


def test_anthropic_structured_output(claude: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
    answer = claude.messages.create(**{**ASK, "max_tokens": 120}, output_config=config)
    assert answer.content[0].type == "text"
    City.model_validate_json(answer.content[0].text)


def test_anthropic_errors_are_its_own(claude: anthropic.Anthropic, guarded: Live) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**ASK, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(**{**ASK, "max_tokens": 10**6})
    for key, right in (("wrong", False), ("sesame", True)):
        with anthropic.Anthropic(base_url=guarded.url, api_key=key, max_retries=0) as client:
            if right:
                assert client.messages.create(**ASK).content
            else:
                with pytest.raises(anthropic.AuthenticationError):
                    client.messages.create(**ASK)


# --- OpenAI's Responses ---------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_responses_whole_equals_stream(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": "Name a colour.", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**options)
    assert whole.output_text
    with client.responses.stream(**options) as stream:
        *events, last = stream
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert last.type in ("response.completed", "response.incomplete")
    assert "".join(deltas) == last.response.output_text == whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 16 or whole.status == "completed"


def test_responses_parse_into_models(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input="A city?", text_format=City, max_output_tokens=120)
    assert isinstance(answer.output_parsed, City)


def test_responses_call_tools(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(City, name="remember_city")["function"]
    flat = {"type": "function", **tool}
    options: Any = {"model": MODEL, "tools": [flat], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(input="A city?", max_output_tokens=150, **options)
    (call,) = answer.output
    assert call.type == "function_call"
    City.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "remembered"}
    conversation: Any = [{"role": "user", "content": "A city?"}, *(item.model_dump() for item in answer.output), result]
    assert client.responses.create(model=MODEL, input=conversation, max_output_tokens=8).output_text


def test_responses_are_kept_where_wanted(tmp_path: Path) -> None:
    flags = ("--responses-store", "--responses-store-path", str(tmp_path / "r.sqlite"), "--itl-ms", "20")
    with live("mock", *flags) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        first = client.responses.create(model="mock", input="hi", max_output_tokens=4)
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = client.responses.create(model="mock", input="and?", previous_response_id=first.id, max_output_tokens=4)
        assert second.previous_response_id == first.id
        assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
        running = client.responses.create(model="mock", input="hi", background=True, extra_body={"ignore_eos": True})
        assert running.status == "in_progress"
        assert client.responses.cancel(running.id).status == "cancelled"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
