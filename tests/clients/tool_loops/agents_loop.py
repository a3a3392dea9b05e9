"""openai-agents in tool loops, which it runs itself: chats and responses, whole and streamed."""

import asyncio
import json
from typing import Any

import agents
from agents import Agent, ModelSettings, Runner
from openai import AsyncOpenAI
from weather import MODEL, QUESTION, URL, found, loop, weather

agents.set_tracing_disabled(True)


def agent(model: str, mode: str) -> Any:
    tool = agents.function_tool(weather, strict_mode=mode == "strict")
    settings = ModelSettings(max_tokens=400, tool_choice="required" if mode == "required" else None)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)  # of one event loop
    chosen = getattr(agents, model)(model=MODEL, openai_client=client)
    return Agent(name="agent", model=chosen, tools=[tool], model_settings=settings)


def told(result: Any) -> dict[str, Any]:
    """Return the visible parts: ids of the calls, and the last text."""
    ids = [item["call_id"] for item in result.to_input_list() if item.get("type") == "function_call"]
    return {"ids": ids, "answer": result.final_output}


def whole(model: str, mode: str) -> object:
    return told(Runner.run_sync(agent(model, mode), QUESTION, max_turns=3))


def streamed(model: str, mode: str) -> object:
    async def play() -> object:
        result = Runner.run_streamed(agent(model, mode), QUESTION, max_turns=3)
        async for _ in result.stream_events():
            pass
        return told(result)

    return asyncio.run(play())


@loop
def chat(mode: str) -> object:
    return whole("OpenAIChatCompletionsModel", mode)


@loop
def chat_stream(mode: str) -> object:
    return streamed("OpenAIChatCompletionsModel", mode)


@loop
def responses(mode: str) -> object:
    return whole("OpenAIResponsesModel", mode)


@loop
def responses_stream(mode: str) -> object:
    return streamed("OpenAIResponsesModel", mode)


print(json.dumps(found))
