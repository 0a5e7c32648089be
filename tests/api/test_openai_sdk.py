"""The official `openai` SDK against a live server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from support.live import Live

MODEL = "smollm2-135m"


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat_whole_equals_stream(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": user("Why is the sky blue?"), "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    text, usage = "", None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=6, temperature=0, logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == reply.choices[0].text
    assert len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 6
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs or [])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=user("Say hello."), max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert len(content) == 6
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == reply.choices[0].message.content


def test_several_choices_and_extra_fields(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=user("Tell me a story."),
        n=3,
        seed=7,
        temperature=1,
        max_tokens=16,
        extra_body={"top_k": 50},
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) == 3


def test_errors_map_to_the_sdk_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=user("hi"), temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=user("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=user("hi"), extra_body={"use_beam_search": True})
    assert unsupported.value.param == "use_beam_search"


def test_key_is_needed(guarded: Live) -> None:
    for key, works in (("sesame", True), ("plain", True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            if works:
                assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=2).choices[0].finish_reason
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
