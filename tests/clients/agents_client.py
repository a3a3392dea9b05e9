"""openai-agents by its model at argv[2], unpatched, against the server at argv[1]; prints its results as JSON."""

import json
import sys
from typing import Any

import agents
from agents import Agent, ModelSettings, Runner
from openai import AsyncOpenAI
from wanted import MODEL, QUESTION, RESULT, TOO_LONG, URL, Address, Seen, Street, error_of, is_wanted

agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
model = getattr(agents, sys.argv[2])(model=MODEL, openai_client=client)
FORCED: dict[str, Any] = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
seen = Seen()


@agents.function_tool
def find(number: int, street: Street) -> str:
    """Finds a house."""
    return RESULT


def agent(max_tokens: int = 300, **more: Any) -> Any:
    more.setdefault("model_settings", ModelSettings(temperature=0, max_tokens=max_tokens))
    return Agent(name="agent", model=model, **more)


def after(result: Any) -> bool:
    """Return whether the next turn gets an answer if it sends all of `result` back."""
    again = [*result.to_input_list(), {"role": "user", "content": QUESTION}]
    return bool(Runner.run_sync(agent(), again).raw_responses)


@seen
def talk() -> object:
    result = Runner.run_sync(agent(instructions="Be brief."), QUESTION)
    return [bool(result.final_output), after(result)]


@seen
def typed() -> object:
    result = Runner.run_sync(agent(output_type=Address), QUESTION)
    return [is_wanted(result.final_output), after(result)]


@seen
def called() -> object:
    settings = ModelSettings(**FORCED, max_tokens=300)
    result = Runner.run_sync(
        agent(tools=[find], model_settings=settings, tool_use_behavior="stop_on_first_tool"), QUESTION
    )
    return [result.final_output, after(result)]


@seen
def goes_on_after_a_call() -> object:
    settings = ModelSettings(**FORCED, max_tokens=300)
    return bool(Runner.run_sync(agent(tools=[find], model_settings=settings), QUESTION, max_turns=3).raw_responses)


@seen
def goes_on_by_id() -> object:
    first = Runner.run_sync(agent(), QUESTION)
    if first.last_response_id is None:  # a chat has none
        return "no id"
    second = Runner.run_sync(agent(), QUESTION, previous_response_id=first.last_response_id)
    used = [each.usage.input_tokens for each in (*first.raw_responses, *second.raw_responses)]
    return used[1] > used[0]


@seen
def cut() -> object:
    settings = ModelSettings(**FORCED, max_tokens=16)
    try:
        return after(Runner.run_sync(agent(tools=[find], model_settings=settings), QUESTION, max_turns=3))
    except agents.ModelBehaviorError:  # max_tokens ended the answer before a call
        return "incomplete"


@seen
def too_long() -> object:
    return error_of(lambda: Runner.run_sync(agent(), TOO_LONG))


print(json.dumps(seen))
