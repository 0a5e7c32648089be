"""LlamaIndex's OpenAI-like LLM against a server: `python llama_index_client.py URL MODEL`."""

from __future__ import annotations

import sys

from city import City
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def check(url: str, model: str) -> None:
    options = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 120, "max_retries": 0}
    llm = OpenAILike(model=model, is_chat_model=True, is_function_calling_model=True, context_window=1024, **options)
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Name a colour.")]
    answer = llm.chat(messages).message.content
    assert answer
    assert list(llm.stream_chat(messages))[-1].message.content == answer
    tool = FunctionTool.from_defaults(
        fn=lambda name, inhabitants, coast: "", name="City", description="A city", fn_schema=City
    )
    said = llm.chat_with_tools([tool], user_msg="A city?", tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(said)
    assert call.tool_name == "City"
    City.model_validate(call.tool_kwargs)
    program = FunctionCallingProgram.from_defaults(
        output_cls=City, prompt_template_str="A city?", llm=llm, tool_required=True, allow_parallel_tool_calls=False
    )
    assert isinstance(program(), City)
    plain = OpenAILike(model=model, is_chat_model=False, context_window=1024, **options)
    text = plain.complete("Once upon a time").text
    assert text
    assert list(plain.stream_complete("Once upon a time"))[-1].text == text


if __name__ == "__main__":
    check(sys.argv[1], sys.argv[2])
    print("llama-index: fine")
