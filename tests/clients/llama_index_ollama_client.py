"""llama-index's Ollama and OllamaEmbedding, unpatched, against the server at argv[1]; prints its results as JSON."""

import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from wanted import ADDRESS, MODEL, QUESTION, RESULT, Address, Seen, Street, is_wanted

CALLED: dict[str, Any] = {  # a call as the engine's parser reads it
    "type": "object",
    "properties": {"name": {"const": "find"}, "parameters": {"const": ADDRESS}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
COMMON: dict[str, Any] = {"model": MODEL, "base_url": sys.argv[1], "temperature": 0, "request_timeout": 60}
model = Ollama(**COMMON, additional_kwargs={"num_predict": 300})
seen = Seen()


def find(city: str, street: Street, others: list[Street]) -> str:
    """Finds an address."""
    return RESULT


TOOL = FunctionTool.from_defaults(find, fn_schema=Address)


@seen
def context() -> object:
    return Ollama(**COMMON).get_context_window()


@seen
def talk() -> object:
    asked = [ChatMessage(content=QUESTION)]
    answer = model.chat(asked)
    streamed = "".join(each.delta or "" for each in model.stream_chat(asked))
    again = model.chat([*asked, answer.message, *asked])
    return [answer.message.content, streamed, bool(again.message), answer.raw["usage"]["completion_tokens"] > 0]


@seen
def completed() -> object:
    return [model.complete(QUESTION).text, "".join(each.delta or "" for each in model.stream_complete(QUESTION))]


@seen
def structured() -> object:
    return is_wanted(model.structured_predict(Address, PromptTemplate(QUESTION)))


@seen
def called() -> object:
    asked = [ChatMessage(content=QUESTION)]
    forced: dict[str, Any] = {"tools": [TOOL.metadata.to_openai_tool()], "format": CALLED}
    response = model.chat(asked, **forced)
    calls = model.get_tool_calls_from_response(response)
    result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_name": calls[0].tool_name})
    history = [*asked, response.message, result]
    after = model.chat_with_tools([TOOL], user_msg=QUESTION, chat_history=history)
    *_, last = model.stream_chat(asked, **forced)
    streamed = model.get_tool_calls_from_response(last)
    return [[[is_wanted(each.tool_kwargs) for each in calls_of] for calls_of in (calls, streamed)], bool(after.message)]


@seen
def embedded() -> object:
    embedding = OllamaEmbedding(model_name=MODEL, base_url=sys.argv[1])
    both = embedding.get_text_embedding_batch(["Lima", "Oslo"])
    one = embedding.get_text_embedding("Lima")
    return [len(both), max(abs(a - b) for a, b in zip(both[0], one, strict=True)) < 1e-3]


print(json.dumps(seen))
