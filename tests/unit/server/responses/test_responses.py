"""POST /v1/responses and its kin: events, objects, what is kept, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.config import ResponsesConfig, ServerConfig
from octavo.runner.scripted import RowFailure
from octavo.server.responses.protocol import ResponsesRequest
from support.asgi import Call, application
from support.scripted import EOS, model_of, spell, until

PATH = "/v1/responses"
ANSWER = [*spell("Hello there"), EOS]


class Client:
    def __init__(self, app: Any, **headers: str) -> None:
        self.app = app
        self.headers = headers

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        query = path.partition("?")[2].encode()
        call = Call(self.app, path.partition("?")[0], body, method=method, headers=self.headers, query=query)
        result = await call.run()
        return call.status, result

    async def create(self, given: Any = "hi", **fields: Any) -> Any:
        status, result = await self.call("POST", PATH, {"input": given, "max_output_tokens": 40, **fields})
        assert status == 200, result
        return result

    async def refused(self, given: Any = "hi", **fields: Any) -> Any:
        status, result = await self.call("POST", PATH, {"input": given, **fields})
        assert 400 <= status < 500, result
        return result["error"]


@contextlib.asynccontextmanager
async def client(script: Any = ANSWER, store: Path | None = None, **options: Any) -> AsyncIterator[Client]:
    config = ResponsesConfig(responses_store=store is not None, responses_store_path=str(store) if store else None)
    async with application(script, responses=config, **options) as (app, _):
        yield Client(app)


def events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for block in stream.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
            TypeAdapter(ResponseStreamEvent).validate_python(found[-1])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def text_of(response: dict[str, Any]) -> str:
    return Response.model_validate(response).output_text


def test_whole_and_streamed_are_the_same_response() -> None:
    async def main() -> None:
        async with client(itl_s=0.002) as api:
            fields = {
                "instructions": "be brief",
                "metadata": {"a": "b"},
                "temperature": 0,
                "user": "u",
                "max_tool_calls": 3,
            }
            whole = await api.create(**fields)
            assert text_of(whole) == "Hello there"
            assert (whole["status"], whole["instructions"], whole["metadata"]) == ("completed", "be brief", {"a": "b"})
            assert whole["usage"]["output_tokens"] == len(ANSWER)
            assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + len(ANSWER)
            assert whole["store"] is False
            streamed = events(await api.create(stream=True, **fields))
            kinds = [event["type"] for event in streamed]
            assert kinds[:4] == [
                "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            ]  # fmt: skip
            assert kinds[-4:] == [
                "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
            ]  # fmt: skip
            assert set(kinds[4:-4]) == {"response.output_text.delta"}
            assert "".join(event["delta"] for event in streamed if "delta" in event) == "Hello there"
            final = streamed[-1]["response"]
            for one, other in zip(whole["output"], final["output"], strict=True):
                assert one | {"id": None} == other | {"id": None}
            assert final["usage"]["input_tokens_details"]["cached_tokens"] > 0
            same = {"id", "created_at", "completed_at", "output", "usage"}
            assert {k: v for k, v in whole.items() if k not in same} == {
                k: v for k, v in final.items() if k not in same
            }

    asyncio.run(main())


def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    async def main() -> None:
        async with client() as api:
            whole = await api.create(max_output_tokens=5)
            assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert (text_of(whole), whole["output"][0]["status"]) == ("Hello", "incomplete")
            assert events(await api.create(max_output_tokens=5, stream=True))[-1]["type"] == "response.incomplete"

    asyncio.run(main())


def test_logprobs_where_they_are_included() -> None:
    async def main() -> None:
        async with client() as api:
            include = ["message.output_text.logprobs"]
            whole = await api.create(include=include, top_logprobs=2)
            logprobs = whole["output"][0]["content"][0]["logprobs"]
            assert "".join(entry["token"] for entry in logprobs[:11]) == "Hello there"
            assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
            streamed = events(await api.create(include=include, top_logprobs=2, stream=True))
            deltas = [entry for event in streamed if "delta" in event for entry in event["logprobs"]]
            assert deltas == logprobs[: len(deltas)]
            assert streamed[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs

    asyncio.run(main())


def test_an_error_in_the_middle_ends_the_stream_as_failed() -> None:
    async def main() -> None:
        async with client([*spell("abc"), RowFailure("broken")], itl_s=0.02) as api:
            streamed = events(await api.create(stream=True))
            assert streamed[-1]["type"] == "response.failed"
            assert streamed[-1]["response"]["error"] == {"code": "server_error", "message": "broken"}
            assert streamed[-1]["response"]["output"] == []
        async with client([RowFailure("broken")]) as api:
            for stream in (False, True):
                status, result = await api.call("POST", PATH, {"input": "x", "stream": stream})
                assert (status, result["error"]["code"]) == (500, "engine_error")

    asyncio.run(main())


def test_an_answer_without_text_has_no_message() -> None:
    async def main() -> None:
        async with client([EOS]) as api:
            assert (await api.create())["output"] == []
            kinds = [event["type"] for event in events(await api.create(stream=True))]
            assert kinds == ["response.created", "response.in_progress", "response.completed"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"given": []}, "input"),
        ({"given": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"given": [{"role": "user", "content": "x", "tool_calls": 1}], "max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**7}, "max_output_tokens"),
        ({"given": "x" * 10_000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"format": {"type": "poem"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"truncation": "middle"}, "truncation"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with client() as api:
            assert (await api.refused(**fields))["param"] == param

    asyncio.run(main())


def test_every_field_that_is_not_built_is_refused() -> None:
    async def main() -> None:
        async with client() as api:
            for name, neutral in ResponsesRequest.not_built.items():
                error = await api.refused(**{name: {"not": "neutral"}})
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")
                for value in neutral:
                    await api.create(**{name: value})

    asyncio.run(main())


def test_truncation_drops_the_oldest_messages() -> None:
    async def main() -> None:
        prompts: list[str] = []
        model = model_of(max_model_len=120)

        def script(start: Any) -> list[int]:
            prompts.append(bytes(start.token_ids[: start.num_prompt_tokens]).decode())
            return ANSWER

        items = [{"role": "user", "content": f"message {number} " + "x" * 20} for number in range(9)]
        async with client(script, model=model) as api:
            assert (await api.refused(items, instructions="brief"))["code"] == "context_length_exceeded"
            kept = await api.create(items, instructions="brief", truncation="auto", max_output_tokens=8)
            assert kept["truncation"] == "auto"
            assert prompts[-1].startswith("system: brief\nuser: message 7")
            assert "message 8" in prompts[-1]
            too_long = [{"role": "user", "content": "y" * 200}]
            assert (await api.refused(too_long, truncation="auto"))["code"] == "context_length_exceeded"

    asyncio.run(main())


def test_conversations_go_on_from_what_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        prompts: list[str] = []

        def script(start: Any) -> list[int]:
            prompts.append(bytes(start.token_ids[: start.num_prompt_tokens]).decode())
            return ANSWER

        async with client(script, tmp_path / "r.sqlite") as api:
            first = await api.create("one", instructions="first only")
            streamed = events(await api.create("two", previous_response_id=first["id"], stream=True))
            second = streamed[-1]["response"]
            third = await api.create("three", previous_response_id=second["id"])
            assert prompts[-1] == (
                "user: one\nassistant: Hello there\nuser: two\nassistant: Hello there\nuser: three\nassistant: "
            )
            assert third["previous_response_id"] == second["id"]
            for response in (first, second, third):
                assert await api.call("GET", f"{PATH}/{response['id']}") == (200, response)
            status, items = await api.call("GET", f"{PATH}/{third['id']}/input_items")
            assert status == 200
            assert [item["content"][0]["text"] for item in items["data"]] == ["three"]
            assert (await api.call("DELETE", f"{PATH}/{first['id']}"))[1]["deleted"] is True
            assert (await api.call("GET", f"{PATH}/{first['id']}"))[0] == 404
            await api.create("four", previous_response_id=third["id"])
            assert prompts[-1].startswith("user: one\n")
            unkept = await api.create("five", store=False)
            assert (await api.call("GET", f"{PATH}/{unkept['id']}"))[1]["error"]["code"] == "response_not_found"
            assert (await api.refused(previous_response_id=unkept["id"]))["param"] == "previous_response_id"
            for method, path in (("POST", f"{third['id']}/cancel"), ("GET", f"{third['id']}?stream=true")):
                assert (await api.call(method, f"{PATH}/{path}"))[0] == 400

    asyncio.run(main())


def test_tenants_do_not_see_one_another(tmp_path: Path) -> None:
    async def main() -> None:
        keys = ServerConfig(api_key=("alice:a", "bob:b"))
        async with client(store=tmp_path / "r.sqlite", server=keys) as api:
            alice, bob = (Client(api.app, authorization=f"Bearer {key}") for key in "ab")
            made = await alice.create()
            for path in ("", "/input_items"):
                assert (await alice.call("GET", f"{PATH}/{made['id']}{path}"))[0] == 200
                assert (await bob.call("GET", f"{PATH}/{made['id']}{path}"))[0] == 404
            assert (await bob.call("DELETE", f"{PATH}/{made['id']}"))[0] == 404
            assert (await bob.call("POST", f"{PATH}/{made['id']}/cancel"))[0] == 404
            assert (await bob.refused(previous_response_id=made["id"]))["code"] == "response_not_found"

    asyncio.run(main())


def test_background_responses_run_alone_and_can_be_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        async with client(store=tmp_path / "r.sqlite", itl_s=0.02) as api:

            async def state(response_id: str) -> str:
                return (await api.call("GET", f"{PATH}/{response_id}"))[1]["status"]

            made = await api.create(background=True)
            assert (made["status"], made["output"]) == ("in_progress", [])
            assert (await api.refused(previous_response_id=made["id"]))["param"] == "previous_response_id"
            async with asyncio.timeout(5):
                while await state(made["id"]) == "in_progress":  # noqa: ASYNC110 - only asking tells
                    await asyncio.sleep(0.02)
            status, done = await api.call("GET", f"{PATH}/{made['id']}")
            assert (status, done["status"], text_of(done)) == (200, "completed", "Hello there")
            assert (await api.call("POST", f"{PATH}/{made['id']}/cancel"))[1]["status"] == "completed"
            endless = {"background": True, "ignore_eos": True, "max_output_tokens": 4000}
            for method, suffix in (("POST", "/cancel"), ("DELETE", "")):
                made = await api.create(**endless)
                await until(lambda: api.app.context.engine.num_unfinished == 1)
                status, ended = await api.call(method, f"{PATH}/{made['id']}{suffix}")
                assert status == 200
                assert ended.get("status") == ("cancelled" if suffix else None)
                await until(lambda: api.app.context.engine.num_unfinished == 0)
            assert (await api.refused(background=True, stream=True))["param"] == "background"
            left = await api.create(**endless)
        # The server has ended; what it could not finish is told as failed.
        async with client(store=tmp_path / "r.sqlite") as api:
            status, ended = await api.call("GET", f"{PATH}/{left['id']}")
            assert (status, ended["status"]) == (200, "failed")

    asyncio.run(main())


TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "function", "name": "stop"},
]
AGENT = (
    "<think>hm, well</think>I will ask.\n<tool_call>\n"
    + json.dumps({"name": "weather", "arguments": {"city": "Oslo 🎉"}})
    + "\n</tool_call>\n<tool_call>\n"
    + json.dumps({"name": "stop", "arguments": {}})
    + "\n</tool_call>"
)


def test_an_agents_turn_streams_item_after_item(tmp_path: Path) -> None:
    async def main() -> None:
        prompts: list[str] = []

        def script(start: Any) -> list[int]:
            prompts.append(bytes(start.token_ids[: start.num_prompt_tokens]).decode())
            return [*spell(AGENT), EOS]

        model = model_of(call_format="hermes", reasoning_format="qwen3")
        async with client(script, tmp_path / "r.sqlite", model=model) as api:
            fields = {"tools": TOOLS, "max_output_tokens": 900}
            whole = await api.create(**fields)
            reasoning, message, *calls = whole["output"]
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, well"}]
            assert message["content"][0]["text"].strip() == "I will ask."
            assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
                ("weather", {"city": "Oslo 🎉"}), ("stop", {}),
            ]  # fmt: skip
            assert (whole["status"], whole["tools"], whole["tool_choice"]) == ("completed", TOOLS, "auto")
            Response.model_validate(whole)

            streamed = events(await api.create(stream=True, **fields))
            final = streamed[-1]["response"]
            ids = {"id", "call_id"}
            for one, other in zip(whole["output"], final["output"], strict=True):
                assert {k: v for k, v in one.items() if k not in ids} == {
                    k: v for k, v in other.items() if k not in ids
                }
            for number, item in enumerate(final["output"]):
                own = [event for event in streamed if event.get("output_index") == number]
                assert own[0]["type"] == "response.output_item.added"
                assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
                told = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
                assert told == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])

            results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sun"} for call in calls]
            again = await api.create([*whole["output"], *results], **fields)
            kept = await api.create(results, previous_response_id=whole["id"], **fields)
            assert kept["previous_response_id"] == whole["id"]
            assert again["previous_response_id"] is None
            assert "Oslo" in prompts[-1]
            assert prompts[-1].count("sun") == 2
            quiet = await api.create(include_reasoning=False, **fields)
            assert [item["type"] for item in quiet["output"]] == ["message", "function_call", "function_call"]

    asyncio.run(main())


def test_tools_that_cannot_be_are_refused() -> None:
    async def main() -> None:
        async with client() as api:
            for tools in ([{"type": "web_search"}], [{"type": "function", "name": "a b"}], [{"type": "function"}]):
                assert (await api.refused(tools=tools))["param"] == "tools"
            for choice in ("some", {"type": "function", "name": "other"}, {"type": "mcp"}):
                assert (await api.refused(tools=TOOLS, tool_choice=choice))["param"] == "tool_choice"

    asyncio.run(main())
