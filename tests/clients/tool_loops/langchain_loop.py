"""LangChain's ChatOpenAI in tool loops: chats and responses, whole and streamed."""

import json
from functools import reduce
from operator import add
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import MODEL, QUESTION, URL, found, loop, weather

COMMON: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 60}
COMMON |= {"max_tokens": 400}
TOOL = tool(weather)
MODELS = {False: ChatOpenAI(**COMMON), True: ChatOpenAI(use_responses_api=True, **COMMON)}


def play(mode: str, *, is_response: bool, is_stream: bool) -> object:
    """Return the visible parts of both turns: the first one, and the text of the second."""
    strict = {"strict": True} if mode == "strict" else {}
    model = MODELS[is_response].bind_tools([TOOL], **strict)
    first = MODELS[is_response].bind_tools([TOOL], **strict, **{"tool_choice": "any"} if mode == "required" else {})

    def answer(bound: Any, turns: list[Any]) -> Any:
        return reduce(add, bound.stream(turns)) if is_stream else bound.invoke(turns)

    asked: list[Any] = [HumanMessage(QUESTION)]
    message = answer(first, asked)
    results: list[ToolMessage] = [TOOL.invoke(call) for call in message.tool_calls]
    second = answer(model, [*asked, message, *results])
    ids = [call["id"] for call in message.tool_calls]
    return {"said": message.text, "ids": ids, "answer": second.text}


@loop
def chat(mode: str) -> object:
    return play(mode, is_response=False, is_stream=False)


@loop
def chat_stream(mode: str) -> object:
    return play(mode, is_response=False, is_stream=True)


@loop
def responses(mode: str) -> object:
    return play(mode, is_response=True, is_stream=False)


@loop
def responses_stream(mode: str) -> object:
    return play(mode, is_response=True, is_stream=True)


print(json.dumps(found))
