"""pydantic-ai in tool loops, which it runs itself: chats and responses, whole and streamed.

It forces calls of its own output tools alone: pydantic_ai_client.py has them.
"""

import json
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent, Tool
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models import openai
from pydantic_ai.providers.openai import OpenAIProvider
from weather import MODEL, QUESTION, URL, found, loop, weather

PROVIDER = OpenAIProvider(base_url=URL, api_key="none")
SETTINGS: Any = {"timeout": 60, "max_tokens": 400}


def agent(model: str, mode: str) -> Any:
    tool = Tool(weather, strict=mode == "strict")
    return Agent(getattr(openai, model)(MODEL, provider=PROVIDER), tools=[tool], model_settings=SETTINGS, retries=0)


def told(result: Any, answer: str) -> dict[str, Any]:
    """Return the visible parts: the ids of the first turn, and the text of the second."""
    first, _, *_ = [message for message in result.all_messages() if isinstance(message, ModelResponse)]
    ids = [part.tool_call_id for part in first.parts if isinstance(part, ToolCallPart)]
    return {"ids": ids, "answer": answer}


def whole(model: str, mode: str) -> object:
    result = agent(model, mode).run_sync(QUESTION)
    return told(result, result.output)


async def read_all(_: object, events: AsyncIterable[object]) -> None:
    async for _ in events:
        pass


def streamed(model: str, mode: str) -> object:
    result = agent(model, mode).run_sync(QUESTION, event_stream_handler=read_all)
    return told(result, result.output)


@loop
def chat(mode: str) -> object:
    return whole("OpenAIChatModel", mode)


@loop
def chat_stream(mode: str) -> object:
    return streamed("OpenAIChatModel", mode)


@loop
def responses(mode: str) -> object:
    return whole("OpenAIResponsesModel", mode)


@loop
def responses_stream(mode: str) -> object:
    return streamed("OpenAIResponsesModel", mode)


print(json.dumps(found))
