"""Request fields beside sampling: what each does, and that those not built are refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo.errors import UnsupportedFieldError
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest, decode, not_built_fields
from octavo.server.responses.protocol import ResponsesRequest
from octavo.text.template import ChatTemplate
from support.asgi import Call, application
from support.scripted import EOS, model_of, spell

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if documents %}{{ documents | map(attribute='text') | join(',') }}{% endif %}{{ reasoning_effort }}"
)


def answer(path: str, body: dict[str, Any], script: Any = None, **options: Any) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        async with application([*spell("abcdefgh"), EOS] if script is None else script, **options) as (app, _):
            call = Call(app, path, body)
            result = await call.run()
            return call.status, result

    return asyncio.run(main())


def chunks(stream: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in stream.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def prompt_of(body: dict[str, Any], path: str = CHAT, **options: Any) -> list[int]:
    status, result = answer(path, {"max_tokens": 1, "return_token_ids": True, **body}, **options)
    assert status == 200, result
    return result["prompt_token_ids"] if path == CHAT else result["choices"][0]["prompt_token_ids"]


def test_truncation_keeps_the_end_or_the_beginning() -> None:
    text = "0123456789"
    for side, kept in ((None, "6789"), ("left", "6789"), ("right", "0123")):
        fields = {"truncate_prompt_tokens": 4, "truncation_side": side}
        for prompt in (text, spell(text)):
            assert prompt_of({"prompt": prompt, **fields}, TEXT) == spell(kept)
    assert prompt_of({"prompt": text, "truncate_prompt_tokens": 10}, TEXT) == spell(text)
    whole = prompt_of({"messages": ASK})
    assert prompt_of({"messages": ASK, "truncate_prompt_tokens": 5}) == whole[-5:]


def test_truncation_to_what_fits_makes_room_for_the_answer() -> None:
    model = model_of(max_model_len=32)
    for prompt in ("x" * 900, spell("y" * 900)):
        kept = prompt_of({"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 8}, TEXT, model=model)
        assert len(kept) == 24
        assert answer(TEXT, {"prompt": prompt, "max_tokens": 8}, model=model)[0] == 400
    for count in (0, -2, 33):
        status, result = answer(TEXT, {"prompt": "x", "truncate_prompt_tokens": count}, model=model)
        assert (status, result["error"]["param"]) == (400, "truncate_prompt_tokens")
    status, result = answer(TEXT, {"prompt": "x", "truncation_side": "left"})
    assert (status, result["error"]["param"]) == (400, "truncation_side")


def test_an_echo_of_a_cut_prompt_is_what_was_kept() -> None:
    _, result = answer(TEXT, {"prompt": "0123456789", "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 2})
    assert result["choices"][0]["text"] == "789ab"


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_stream_interval_collects_tokens(path: str) -> None:
    body = {"prompt": "x"} if path == TEXT else {"messages": ASK}

    def texts(**fields: Any) -> list[str]:
        status, result = answer(path, {**body, "max_tokens": 20, "stream": True, **fields}, itl_s=0.005)
        assert status == 200
        choices = [choice for chunk in chunks(result) for choice in chunk["choices"]]
        found = [choice["text"] if path == TEXT else choice["delta"].get("content", "") for choice in choices]
        return [text for text in found if text]

    for interval in (3, 1024):
        first, *middle, last = texts(
            stream_interval=interval
        )  # a slow machine may put more than one token into the first
        assert "".join([first, *middle, last]) == "abcdefgh"
        assert all(len(text) >= interval for text in middle)
    assert len(texts()) >= len(texts(stream_interval=1024)) == 2
    for fields in ({"stream_interval": 0}, {"stream_interval": 1025}, {"stream_interval": 2, "stream": False}):
        status, result = answer(path, {**body, "stream": True, **fields})
        assert (status, result["error"]["param"]) == (400, "stream_interval")


@pytest.mark.parametrize("content", ["I say ", [{"type": "text", "text": "I "}, {"type": "text", "text": "say "}]])
def test_echo_of_a_continued_message(content: Any) -> None:
    messages = [*ASK, {"role": "assistant", "content": content}]
    body = {"messages": messages, "max_tokens": 3, "continue_final_message": True, "echo": True}
    _, result = answer(CHAT, body)
    assert result["choices"][0]["message"]["content"] == "I say abc"
    _, streamed = answer(CHAT, {**body, "stream": True})
    parts = [choice["delta"].get("content", "") for chunk in chunks(streamed) for choice in chunk["choices"]]
    assert "".join(parts) == "I say abc"
    _, result = answer(CHAT, {"messages": ASK, "max_tokens": 3, "echo": True})
    assert result["choices"][0]["message"]["content"] == "abc"


def test_documents_and_reasoning_effort_reach_the_template() -> None:
    model = model_of(chat_template=ChatTemplate(TEMPLATE))
    fields = {"documents": [{"text": "one"}, {"text": "two"}], "reasoning_effort": "low", "return_prompt_text": True}
    for stream in (False, True):
        _, result = answer(CHAT, {"messages": ASK, "max_tokens": 2, "stream": stream, **fields}, model=model)
        first = chunks(result)[0] if stream else result
        assert first["prompt_text"] == "user: hello\none,twolow"
    for name, given in (("documents", [{"text": "x"}]), ("reasoning_effort", "low")):
        status, result = answer(
            CHAT, {"messages": ASK, name: given, "chat_template_kwargs": {name: given}}, model=model
        )
        assert (status, result["error"]["param"]) == (400, name)


def test_reasoning_effort_switches_thinking_where_the_template_can() -> None:
    model = model_of(chat_template=ChatTemplate("{{ messages[0].content }}{{ enable_thinking }}"))
    for effort, shown in (("none", "False"), ("high", "True")):
        body = {"messages": ASK, "max_tokens": 2, "reasoning_effort": effort, "return_prompt_text": True}
        assert answer(CHAT, body, model=model)[1]["prompt_text"] == f"hello{shown}"


@pytest.mark.parametrize(("field", "value"), [("documents", [{"text": "x"}]), ("reasoning_effort", "high")])
def test_what_the_template_would_ignore_is_refused(field: str, value: Any) -> None:
    status, result = answer(CHAT, {"messages": ASK, field: value})
    assert status == 400
    assert result["error"]["code"] == "unsupported_parameter"
    assert result["error"]["param"] == field


def test_labels_change_nothing() -> None:
    labels = {
        "user": "u", "safety_identifier": "s", "session_id": "i", "prompt_cache_key": "k", "metadata": {"a": "b"},
        "reasoning_effort": "none", "documents": [], "spaces_between_special_tokens": False, "service_tier": "auto",
    }  # fmt: skip
    _, plain = answer(CHAT, {"messages": ASK, "max_tokens": 5})
    status, labelled = answer(CHAT, {"messages": ASK, "max_tokens": 5, **labels})
    assert status == 200
    assert labelled["choices"] == plain["choices"]
    for wrong in ({str(i): "x" for i in range(17)}, {"k" * 65: "x"}, {"k": "x" * 513}, {"k": 1}, []):
        status, result = answer(CHAT, {"messages": ASK, "metadata": wrong})
        assert (status, result["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_fields_that_are_not_built_are_refused_by_name(kind: Any) -> None:
    from octavo.server.protocol import _NOT_BUILT

    body = {"messages": ASK} if kind is ChatCompletionRequest else {"prompt": "x"}
    for name, neutral in _NOT_BUILT.items():
        if name in kind.__struct_fields__:
            continue
        for value in ({"not": "neutral"}, "not neutral", 77, [77]):
            with pytest.raises(UnsupportedFieldError) as refusal:
                decode(json.dumps({**body, name: value}).encode(), kind)
            assert refusal.value.param == name
        for value in (*neutral, None):
            assert decode(json.dumps({**body, name: value}).encode(), kind) == decode(json.dumps(body).encode(), kind)


NAMES: dict[Any, str] = {
    ChatCompletionRequest: "messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n "
    "presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice parallel_tool_calls "
    "reasoning_effort user metadata store service_tier modalities audio prediction verbosity web_search_options functions function_call "
    "safety_identifier prompt_cache_key prompt_cache_retention moderation include_reasoning echo add_generation_prompt "
    "continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text",
    CompletionRequest: "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user prompt_embeds response_format",
    ResponsesRequest: "input instructions background include max_output_tokens max_tool_calls metadata model logit_bias conversation "
    "parallel_tool_calls previous_response_id prompt reasoning service_tier store stream stream_options temperature text tool_choice "
    "tools top_logprobs top_p truncation user prompt_cache_key prompt_cache_retention safety_identifier top_k min_p repetition_penalty "
    "presence_penalty frequency_penalty seed stop stop_token_ids ignore_eos structured_outputs priority cache_salt session_id request_id "
    "vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs include_reasoning previous_input_messages "
    "enable_response_messages prompt_cache_options skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
    "watermarking media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs",
}
VLLM = (
    "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids bad_words prompt_logprobs "
    "logprob_token_ids structured_outputs priority request_id session_id cache_salt return_token_ids return_tokens_as_token_ids "
    "return_token_offsets kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval "
    "watermarking add_special_tokens return_weight_versions routed_experts_prompt_start mm_payload return_mm_kwargs guided_json "
    "guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern"
)


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_every_field_of_openai_and_vllm_is_known(kind: Any) -> None:
    """Works, or is refused by name: nothing is an unknown field, and nothing is ignored."""
    names = {*NAMES[kind].split(), *(VLLM.split() if kind is not ResponsesRequest else ())}
    assert names <= {*kind.__struct_fields__, *not_built_fields(kind)}


def test_best_of_gives_the_choices_that_are_likeliest_per_token() -> None:
    def script(start: Any) -> list[int]:
        return spell("abcdefgh"[start.sampling.choice] * 4)

    status, everything = answer(TEXT, {"prompt": "x", "max_tokens": 4, "n": 6, "logprobs": 0}, script)
    assert status == 200
    means = [sum(choice["logprobs"]["token_logprobs"]) / 4 for choice in everything["choices"]]
    ranked = sorted(range(6), key=lambda number: -means[number])
    status, best = answer(TEXT, {"prompt": ["x", "y"], "max_tokens": 4, "n": 2, "best_of": 6}, script)
    assert status == 200
    texts = [everything["choices"][number]["text"] for number in ranked[:2]]
    assert [choice["text"] for choice in best["choices"]] == texts * 2
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 2 * 6 * 4
    for fields in ({"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": 129}, {"best_of": 2, "stream": True}):
        status, result = answer(TEXT, {"prompt": "x", **fields})
        assert (status, result["error"]["param"]) == (400, "best_of")
    assert answer(TEXT, {"prompt": "x", "best_of": 2, "n": 0})[1]["error"]["param"] == "n"
    status, stream = answer(TEXT, {"prompt": "x", "best_of": 2, "n": 2, "stream": True, "max_tokens": 2})
    assert status == 200 and len({chunk["choices"][0]["index"] for chunk in chunks(stream)}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_prompt_and_answer(stream: bool) -> None:
    body = {"messages": ASK, "max_tokens": 3, "return_token_ids": True, "stream": stream}
    _, result = answer(CHAT, body)
    parts = chunks(result) if stream else [result]
    ids = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids", ())]
    assert bytes(ids).decode() == "abc"
    assert bytes(parts[0]["prompt_token_ids"]).decode() == "user: hello\nassistant: "


def test_tokens_named_by_their_ids() -> None:
    body = {"messages": ASK, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    entries = answer(CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in b"ab"]
    _, result = answer(TEXT, {"prompt": "x", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True})
    assert result["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in b"ab"]


def test_max_completion_tokens_is_the_newer_name() -> None:
    _, result = answer(CHAT, {"messages": ASK, "max_completion_tokens": 4})
    assert result["choices"][0]["message"]["content"] == "abcd"
    assert answer(CHAT, {"messages": ASK, "max_completion_tokens": 4, "max_tokens": 4})[0] == 200
    status, result = answer(CHAT, {"messages": ASK, "max_completion_tokens": 4, "max_tokens": 5})
    assert (status, result["error"]["param"]) == (400, "max_completion_tokens")
