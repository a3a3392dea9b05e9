"""pydantic-ai by its model at argv[2], unpatched, against the server at argv[1]; prints its results as JSON."""

import json
import sys
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import openai
from pydantic_ai.providers.openai import OpenAIProvider
from wanted import MODEL, QUESTION, TOO_LONG, URL, Address, Seen, error_of, is_wanted

model = getattr(openai, sys.argv[2])(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
SETTINGS: Any = {"temperature": 0, "parallel_tool_calls": False, "timeout": 60, "max_tokens": 300}
plain = Agent(model, model_settings=SETTINGS)
seen = Seen()


def typed(kind: Any) -> Any:
    return Agent(model, output_type=kind(Address), model_settings=SETTINGS, retries=0)


@seen
def talk() -> object:
    first = plain.run_sync(QUESTION)
    second = plain.run_sync(QUESTION, message_history=first.all_messages())
    return [bool(first.output), bool(second.output)]


@seen
def called() -> object:
    first = typed(ToolOutput).run_sync(QUESTION)
    second = typed(ToolOutput).run_sync(QUESTION, message_history=first.all_messages())
    return [is_wanted(first.output), is_wanted(second.output)]


@seen
def structured() -> object:
    first = typed(NativeOutput).run_sync(QUESTION)
    second = typed(NativeOutput).run_sync(QUESTION, message_history=first.all_messages())
    return [is_wanted(first.output), is_wanted(second.output)]


@seen
def streamed() -> object:
    kinds = (ToolOutput, NativeOutput)
    return [is_wanted(typed(each).run_stream_sync(QUESTION).get_output()) for each in kinds]


@seen
def cut() -> object:
    agent = Agent(model, output_type=ToolOutput(Address), model_settings=SETTINGS | {"max_tokens": 16}, retries=0)
    return error_of(lambda: agent.run_sync(QUESTION))


@seen
def too_long() -> object:
    return error_of(lambda: plain.run_sync(TOO_LONG))


print(json.dumps(seen))
