"""LangChain's OpenAI chat model against a server, over chat and over responses: `python langchain_client.py URL MODEL`."""

from __future__ import annotations

import sys

from city import City
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI


def check(url: str, model: str, *, responses: bool) -> None:
    chat = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=120,
        use_responses_api=responses,
    )
    ask = [SystemMessage("Be brief."), HumanMessage("Name a colour.")]
    answer = chat.invoke(ask)
    assert answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(ask)) == answer.text
    city = chat.with_structured_output(City, method="json_schema").invoke("A city?")
    assert isinstance(city, City), city
    turn = chat.bind_tools([City], tool_choice="any", parallel_tool_calls=False).invoke("A city?")
    assert isinstance(turn, AIMessage)
    (call,) = turn.tool_calls
    assert call["name"] == "City"
    City.model_validate(call["args"])
    result = ToolMessage("remembered", tool_call_id=call["id"])
    assert chat.bind_tools([City], tool_choice="none").invoke([HumanMessage("A city?"), turn, result]).text
    merged = None
    for chunk in chat.bind_tools([City], tool_choice="any", parallel_tool_calls=False).stream("A city?"):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    assert [(call["name"], call["args"]) for call in merged.tool_calls] == [(call["name"], call["args"])]


if __name__ == "__main__":
    for responses in (False, True):
        check(sys.argv[1], sys.argv[2], responses=responses)
        print(f"langchain over {'responses' if responses else 'chat'}: fine")
