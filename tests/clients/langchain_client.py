"""LangChain's chat model, unpatched, against the server at argv[1]; prints its results as JSON."""

import asyncio
import json
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from wanted import MODEL, QUESTION, RESULT, TOO_LONG, URL, Address, Seen, error_of, is_wanted

COMMON: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 60}
COMMON |= {"temperature": 0, "max_tokens": 300}
chat, responses = ChatOpenAI(**COMMON), ChatOpenAI(use_responses_api=True, **COMMON)
MODELS = (chat, responses)
FORCED: dict[str, Any] = {"tools": [Address], "tool_choice": "any", "parallel_tool_calls": False}
seen = Seen()


@seen
def talk() -> object:
    talked = [SystemMessage("Be brief."), HumanMessage("Hello!"), AIMessage("Hello!"), HumanMessage(QUESTION)]
    answer = chat.invoke(talked)
    told = bool(answer.content), answer.response_metadata["finish_reason"], answer.usage_metadata["output_tokens"] > 0
    again = [*talked, answer, HumanMessage(QUESTION)]
    return [*told, [type(model.invoke(again)).__name__ for model in MODELS]]


@seen
def streamed() -> object:
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    text = "".join(chunk.content for chunk in chunks)
    return [text == chat.invoke(QUESTION).content, any(chunk.usage_metadata for chunk in chunks)]


@seen
def batch() -> object:
    return len(chat.batch([QUESTION, "What is the capital of Chile?"]))


@seen
def chain() -> object:
    return bool((ChatPromptTemplate.from_template("What is the capital of {land}?") | chat).invoke("Peru").content)


@seen
def awaited() -> object:
    return asyncio.run(chat.ainvoke(QUESTION)).content == chat.invoke(QUESTION).content


@seen
def structured() -> object:
    methods = ("json_schema", "function_calling")
    return [is_wanted(chat.with_structured_output(Address, method=each).invoke(QUESTION)) for each in methods]


@seen
def called() -> object:
    found = []
    for model in MODELS:
        message = model.bind_tools(**FORCED).invoke(QUESTION)
        results = [ToolMessage(RESULT, tool_call_id=call["id"]) for call in message.tool_calls]
        again = [HumanMessage(QUESTION), message, *results, HumanMessage(QUESTION)]
        answer = model.bind_tools([Address]).invoke(again)
        found.append([[is_wanted(call["args"]) for call in message.tool_calls], type(answer).__name__])
    return found


@seen
def called_in_a_stream() -> object:
    found = []
    for model in MODELS:
        first, *more = model.bind_tools(**FORCED).stream(QUESTION)
        found.append([is_wanted(call["args"]) for call in sum(more, first).tool_calls])
    return found


@seen
def cut() -> object:
    found = []
    for is_response in (False, True):
        model = ChatOpenAI(use_responses_api=is_response, **COMMON | {"max_tokens": 16})
        torn = model.bind_tools(**FORCED).invoke(QUESTION)
        answer = model.invoke([HumanMessage(QUESTION), torn, HumanMessage("So?")]) if not torn.tool_calls else torn
        found.append(type(answer).__name__)
    return found


@seen
def too_long() -> object:
    return [error_of(lambda model=model: model.invoke(TOO_LONG)) for model in MODELS]


print(json.dumps(seen))
