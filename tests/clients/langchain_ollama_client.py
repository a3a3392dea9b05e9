"""LangChain's ChatOllama, OllamaLLM and OllamaEmbeddings, unpatched, against the server at argv[1]; prints JSON."""

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from wanted import ADDRESS, MODEL, QUESTION, RESULT, Address, Seen, is_wanted

CALLED: dict[str, Any] = {  # a call as the engine's parser reads it
    "type": "object",
    "properties": {"name": {"const": "Address"}, "parameters": {"const": ADDRESS}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
COMMON: dict[str, Any] = {"model": MODEL, "base_url": sys.argv[1], "temperature": 0, "num_predict": 300}
chat = ChatOllama(**COMMON, validate_model_on_init=True)
seen = Seen()


@seen
def talk() -> object:
    talked = [SystemMessage("Be brief."), HumanMessage("Hello!"), AIMessage("Hello!"), HumanMessage(QUESTION)]
    answer = chat.invoke(talked)
    again = chat.invoke([*talked, answer, HumanMessage(QUESTION)])
    reason = answer.response_metadata["done_reason"]
    return [bool(answer.content), reason, answer.usage_metadata["output_tokens"] > 0, type(again).__name__]


@seen
def streamed() -> object:
    chunks = list(chat.stream(QUESTION))
    return ["".join(each.content for each in chunks), any(each.usage_metadata for each in chunks)]


@seen
def awaited() -> object:
    return asyncio.run(chat.ainvoke(QUESTION)).content


@seen
def continued() -> object:
    return OllamaLLM(**COMMON | {"num_predict": 8}).invoke(QUESTION) != ""


@seen
def structured() -> object:
    return is_wanted(chat.with_structured_output(Address, method="json_schema").invoke(QUESTION))


@seen
def called() -> object:
    model = chat.bind_tools([Address])
    message = model.invoke(QUESTION, format=CALLED)
    results = [ToolMessage(RESULT, tool_call_id=call["id"]) for call in message.tool_calls]
    after = chat.bind_tools([Address]).invoke([HumanMessage(QUESTION), message, *results])
    first, *more = model.stream(QUESTION, format=CALLED)
    streamed_calls = sum(more, first).tool_calls
    calls = [[is_wanted(call["args"]) for call in each] for each in (message.tool_calls, streamed_calls)]
    return [calls, type(after).__name__]


@seen
def embedded() -> object:
    model = OllamaEmbeddings(model=MODEL, base_url=sys.argv[1])
    both = model.embed_documents(["Lima", "Oslo"])
    one = model.embed_query("Lima")
    return [len(both), max(abs(a - b) for a, b in zip(both[0], one, strict=True)) < 1e-3]


print(json.dumps(seen))
