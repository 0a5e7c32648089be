"""Structured outputs on a live server: whole, streamed, with logprobs, choices, stops, jumps; wrong ones refused (O-03, O-17, O-34)."""

from __future__ import annotations

import concurrent.futures
import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from octavo.errors import InvalidRequestError
from octavo.frontend.llm import LLM
from octavo.frontend.params import SamplingParams
from octavo.frontend.structured import StructuredOutputsParams
from support.live import Live

MODEL = "smollm2-135m"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


_DIGIT = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TAG = {"type": "sequence", "elements": [{**_DIGIT, "end": "</n>"}, {"type": "const_string", "value": "!"}]}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_a_schema_whole_streamed_and_in_several_choices(server: Live) -> None:
    fields = {"response_format": json_schema(PERSON), "temperature": 1, "seed": 3, "max_tokens": 60}
    whole = server.chat("Who are you?", **fields).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    check_person(whole["message"]["content"])
    messages = [{"role": "user", "content": "Who are you?"}]
    chunks = server.stream("/v1/chat/completions", {"messages": messages, **fields})
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    several = server.chat("Who are you?", n=3, **fields).json()["choices"]
    assert several[0]["message"] == whole["message"]
    for choice in several:
        check_person(choice["message"]["content"])
    assert len({choice["message"]["content"] for choice in several}) > 1


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, r"\d{3}-\d{4}"),
        ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]{2} "z"'}}, r"a\d\dz"),
        ({"guided_grammar": 'root ::= "a" [0-9]{2} "z"'}, r"a\d\dz"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "1|2"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"structured_outputs": {"structural_tag": {"format": TAG}}}, r"<n>[0-9]</n>!"),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, r"<n>[0-9]</n>!"),
        (
            {
                "structured_outputs": {
                    "json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
                    "disable_any_whitespace": True,
                }
            },
            r"\[1,1\]",
        ),
    ],
)
def test_every_way_to_ask(server: Live, fields: dict[str, Any], pattern: str) -> None:
    for reply in (server.chat("Say it.", max_tokens=20, **fields), server.complete("It is", max_tokens=20, **fields)):
        choice = reply.json()["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"


def test_json_object(server: Live) -> None:
    choice = server.chat('Reply with {"a": 1}.', response_format={"type": "json_object"}, max_tokens=100).json()[
        "choices"
    ][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")


def test_logprobs_are_of_the_raw_logits_and_strict_json(server: Live) -> None:
    choice = server.chat("Say yes.", structured_outputs={"choice": ["zebra"]}, logprobs=True, top_logprobs=5).json()[
        "choices"
    ][0]
    assert choice["message"]["content"] == "zebra"
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == "zebra"
    assert all(len(entry["top_logprobs"]) == 5 and entry["logprob"] <= 0 for entry in entries)
    # What the grammar leaves is not what the model would have said.
    assert entries[0]["top_logprobs"][0]["logprob"] > entries[0]["logprob"]


def test_a_stop_string_ends_it_earlier(server: Live) -> None:
    choice = server.chat("Hi", structured_outputs={"choice": ["one two three"]}, stop=["two"], max_tokens=20).json()[
        "choices"
    ][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")


@pytest.mark.parametrize("fields", [{}, {"stop": ["_of_"]}, {"max_tokens": 9}, {"n": 2, "frequency_penalty": 1.0}])
def test_jumps_change_nothing(server: Live, fields: dict[str, Any]) -> None:
    """With logprobs every token is sampled; without them, those that the names of properties leave no choice of are not."""
    names = ["the_name_of_the_ship", "the_number_of_its_masts"]
    properties = {names[0]: {"type": "string", "maxLength": 9}, names[1]: {"type": "integer", "maximum": 9}}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    options = {"response_format": json_schema(schema), "temperature": 1, "seed": 5, "max_tokens": 60, **fields}
    sampled, jumped = (server.chat("A ship?", logprobs=logprobs, **options).json() for logprobs in (True, False))
    assert jumped["usage"]["completion_tokens"] == sampled["usage"]["completion_tokens"]
    for one, other in zip(jumped["choices"], sampled["choices"], strict=True):
        assert {**one, "logprobs": None} == {**other, "logprobs": None}
    messages = [{"role": "user", "content": "A ship?"}]
    chunks = server.stream("/v1/chat/completions", {"messages": messages, **options})
    pieces = [
        choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0
    ]
    assert "".join(pieces) == jumped["choices"][0]["message"]["content"]


def test_it_is_the_same_beside_others(server: Live) -> None:
    fields = {"response_format": json_schema(PERSON), "temperature": 1, "seed": 11, "max_tokens": 60, "logprobs": True}
    alone = server.chat("Who?", **fields).json()["choices"][0]

    def other(seed: int) -> dict[str, Any]:
        if seed % 2:
            return server.chat("Tell me a story.", max_tokens=40, temperature=1, seed=seed).json()
        return server.chat("Who?", **{**fields, "seed": seed}).json()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(other, seed) for seed in range(6)]
        again = pool.submit(lambda: server.chat("Who?", **fields).json()["choices"][0])
        assert again.result() == alone
        for one in others:
            assert one.result()["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": json_schema({"type": "strnig"})}, "response_format"),
        ({"response_format": json_schema([])}, "response_format"),
        ({"response_format": json_schema({"type": "array", "uniqueItems": True})}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"structured_outputs": {"regex": "[q-"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{bad"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"wish": 1}}, "structured_outputs"),
        ({"guided_json": {"type": "strnig"}}, "guided_json"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_wrong_ones_are_refused_before_anything_starts(
    server: Live, stream: bool, fields: dict[str, Any], param: str
) -> None:
    reply = server.chat("Hi", stream=stream, **fields)
    assert reply.status == 400, reply.body
    error = reply.error()
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert server.idle_within(5)


def test_the_sdk_parses(server: Live) -> None:
    class Person(BaseModel):
        name: str
        age: int

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        reply = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Who are you?"}],
            response_format=Person,
            max_tokens=80,
            temperature=0.5,
            seed=1,
        )
        assert isinstance(reply.choices[0].message.parsed, Person)


def test_offline_in_a_child_process() -> None:
    """The matchers live beside the engine, also where that is another process."""
    with LLM(MODEL, max_model_len=256, kv_cache_memory="16M", engine_process=True) as llm:
        choice = StructuredOutputsParams(choice=["apple", "pear"])
        params = [SamplingParams(structured_outputs=choice), SamplingParams(max_tokens=4, temperature=0)]
        fruit, plain = llm.generate(["An ", "One, two,"], params, use_tqdm=False)
        assert fruit.outputs[0].text in ("apple", "pear")
        assert plain.outputs[0].finish_reason == "length"
        old_name = llm.generate("An ", SamplingParams(guided_decoding=choice), use_tqdm=False)
        assert old_name[0].outputs[0].text in ("apple", "pear")
        with pytest.raises(InvalidRequestError, match="uniqueItems"):
            llm.generate(
                "x",
                SamplingParams(structured_outputs=StructuredOutputsParams(json={"uniqueItems": True})),
                use_tqdm=False,
            )


def test_tools_are_told_offline() -> None:
    with LLM(MODEL, max_model_len=512, kv_cache_memory="16M") as llm:
        ask = [{"role": "user", "content": "Hi"}]
        plain = llm.chat(ask, SamplingParams(max_tokens=1), use_tqdm=False)
        tool = {"type": "function", "function": {"name": "weather"}}
        told = llm.chat(ask, SamplingParams(max_tokens=1), tools=[tool], use_tqdm=False)
        assert "weather" in str(told[0].prompt)
        assert len(told[0].prompt_token_ids) > len(plain[0].prompt_token_ids)
