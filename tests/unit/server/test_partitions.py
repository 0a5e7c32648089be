"""However a model's output falls into steps, message, calls, reasoning and finish reason are the same, whole and streamed, in all APIs
that answer conversations (O-11, O-13).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from octavo.contracts import FinishReason, TokenEvent
from octavo.frontend.model import ServedModel
from octavo.frontend.outputs import Delta
from octavo.frontend.params import SamplingParams
from octavo.frontend.requests import Prepared, RequestBuilder
from octavo.frontend.stream import OutputStream
from octavo.frontend.tools import parse_tools, reading_of
from octavo.server.chat import ChatStream, reader_of
from octavo.server.generation import Ids, UsageCount
from octavo.server.messages.answer import MessageAnswer
from octavo.server.protocol import ChatChunk, ChatCompletionRequest, StreamOptions
from octavo.server.responses.answer import ResponseAnswer
from octavo.server.responses.protocol import ResponsesRequest
from octavo.text.calls import CALL_FORMATS, REASONING_FORMATS
from support.model_outputs import CASES, REASONING, TOOLS, outputs, parts_of
from support.scripted import EOS, model_of, spell

ASK = [{"role": "user", "content": "Well?"}]
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in TOOLS.items()
]
BODY = msgspec.convert({"messages": ASK}, ChatCompletionRequest)
NAMED = {"type": "function", "function": {"name": "f"}}
Steps = Sequence[tuple[int, int]]


class Answer:
    """One output in steps, as each API tells it."""

    def __init__(
        self, model: ServedModel, prepared: Prepared, tokens: Sequence[int], steps: Steps, reason: FinishReason
    ):
        self.prepared = prepared
        self.deltas: list[Delta] = []
        request = prepared.requests[0]
        stream = OutputStream(request, prepared.params, model, prepared.reading.markers)
        for number, (begin, end) in enumerate(steps, start=1):
            last = number == len(steps)
            event = TokenEvent(
                request_id=request.request_id,
                token_ids=tuple(tokens[begin:end]),
                num_cached_tokens=0 if number == 1 else None,
                finish_reason=reason if last else None,
            )
            if (delta := stream.push(event)) is not None:
                self.deltas.append(delta)
            if stream.finished:
                break

    def chunks(self) -> list[ChatChunk]:
        usage = UsageCount([self.prepared])
        stream = ChatStream(None, BODY, self.prepared, Ids("chatcmpl", "m"), usage, StreamOptions())  # type: ignore[arg-type]
        return [chunk for delta in self.deltas for chunk in stream.chunks(delta)]

    def whole(self) -> dict[str, Any]:
        reader = reader_of(self.prepared, BODY)
        message = reader.message("".join(delta.text for delta in self.deltas))
        reason = self.deltas[-1].finish_reason
        assert reason is not None
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return {
            "content": message.content or "",
            "reasoning": "" if message.reasoning is UNSET else message.reasoning,
            "calls": calls,
            "reason": reader.finish_reason(reason),
        }

    def streamed(self) -> dict[str, Any]:
        told: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
        for chunk in self.chunks():
            (choice,) = chunk.choices
            assert told["reason"] is None, "a chunk after the last"
            delta = choice.delta
            told["content"] += delta.content or ""
            told["reasoning"] += delta.reasoning or ""
            for call in delta.tool_calls or ():
                if call.id is not UNSET:
                    assert call.index == len(told["calls"])
                    told["calls"].append((call.function.name, ""))
                name, arguments = told["calls"][call.index]
                assert call.index == len(told["calls"]) - 1, "an earlier call goes on"
                told["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
            told["reason"] = choice.finish_reason
        return told

    def response(self) -> list[Any]:
        body = msgspec.convert({"input": "Well?"}, ResponsesRequest)
        answer = ResponseAnswer(body, "m", self.prepared.params, store=False)
        events = [event for chunk in self.chunks() for event in answer.take(chunk)]
        usage = UsageCount([self.prepared]).usage()
        events += answer.finish(usage)
        items: list[Any] = [answer.body()["status"]]
        for number, item in enumerate(answer.output):
            own = [event["delta"] for event in events if event.get("output_index") == number and "delta" in event]
            if item["type"] == "function_call":
                items.append(("call", item["name"], item["arguments"]))
            else:
                items.append((item["type"], *(part["text"] for part in item["content"])))
            assert "".join(own) == items[-1][-1]
        return items

    def message(self) -> list[Any]:
        answer = MessageAnswer("m")
        said: list[str] = []
        for event in (event for chunk in self.chunks() for event in answer.take(chunk)):
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(said)
                    said.append("")
                case "content_block_delta":
                    said[event["index"]] += next(text for name, text in event["delta"].items() if name != "type")
        list(answer.finish(UsageCount([self.prepared]).usage()))
        body = answer.body()
        blocks = [{name: value for name, value in block.items() if name != "id"} for block in body["content"]]
        assert len(blocks) == len(said)
        return [body["stop_reason"], body["stop_sequence"], *zip(blocks, said, strict=True)]

    def told(self) -> list[Any]:
        return [self.whole(), self.streamed(), self.response(), self.message()]


def check(
    name: str,
    text: str,
    steps: Steps | None,
    *,
    reasoning: str | None = None,
    choice: Any = None,
    parallel: bool = True,
    stop: str | None = None,
    length: int | None = None,
) -> list[Any]:
    """What the APIs tell, after comparing steps with one token at a time, and the APIs with one another. `length`: tokens allowed."""
    model = model_of(call_format=name, reasoning_format=reasoning)
    params = SamplingParams(max_tokens=5000, stop=None if stop is None else [stop])
    reading = reading_of(model, parse_tools(FUNCTIONS, choice, parallel), None)
    prepared = RequestBuilder(model).build_chat(ASK, params, reading=reading)
    tokens = [*spell(text), EOS][:length]
    reason = FinishReason.STOP if tokens[-1:] == [EOS] else FinishReason.LENGTH
    one_by_one = [(place, place + 1) for place in range(len(tokens))] or [(0, 0)]
    expected = Answer(model, prepared, tokens, one_by_one, reason).told()
    for others in ([(0, len(tokens))], steps or []):
        if others:
            assert Answer(model, prepared, tokens, others, reason).told() == expected
    whole, streamed, response, message = expected
    assert streamed == whole
    assert "".join(item[1] for item in response[1:] if item[0] == "message") == whole["content"]
    assert "".join(item[1] for item in response[1:] if item[0] == "reasoning") == whole["reasoning"]
    assert [item[1:] for item in response[1:] if item[0] == "call"] == whole["calls"]
    assert "".join(block.get("text", "") for block, _ in message[2:]) == whole["content"]
    assert "".join(block.get("thinking", "") for block, _ in message[2:]) == whole["reasoning"]
    assert [(block["name"], said) for block, said in message[2:] if block["type"] == "tool_use"] == whole["calls"]
    return expected


@pytest.mark.parametrize("reasoning", [None, *REASONING_FORMATS])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_every_format_after_every_way_to_reason(name: str, reasoning: str | None) -> None:
    before = "" if reasoning is None else "hm</think>" if REASONING_FORMATS[reasoning] else "<think>hm</think>"
    for text, calls, content in CASES[name]:
        whole = check(name, before + text, None, reasoning=reasoning)[0]
        assert [(called, json.loads(arguments)) for called, arguments in whole["calls"]] == calls
        assert whole["reasoning"] == ("hm" if reasoning else "")
        assert whole["content"] == content
        assert whole["reason"] == ("tool_calls" if calls else "stop")


@settings(max_examples=300, deadline=None)
@given(
    outputs(),
    st.sampled_from([*REASONING, "", ""]),
    st.sampled_from([None, *REASONING_FORMATS]),
    st.sampled_from([None, "required", NAMED]),
    st.booleans(),
    st.sampled_from([None, None, "x", "\n", "</tool_call>", "é", '"']),
    st.data(),
)
def test_no_steps_change_an_answer(
    output: tuple[str, str],
    before: str,
    reasoning: str | None,
    choice: Any,
    parallel: bool,
    stop: str | None,
    data: st.DataObject,
) -> None:
    name, text = output
    num_tokens = len((before + text).encode()) + 1
    length = data.draw(st.sampled_from([num_tokens, num_tokens, num_tokens // 2, num_tokens - 2, 1]))
    steps = data.draw(parts_of(max(1, min(length, num_tokens))))
    check(
        name,
        before + text,
        steps,
        reasoning=reasoning,
        choice=choice,
        parallel=parallel,
        stop=stop,
        length=max(1, length),
    )
