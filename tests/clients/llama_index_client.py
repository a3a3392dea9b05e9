"""llama-index's OpenAILike, unpatched, against the server at argv[1]; prints its results as JSON."""

import json
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from wanted import CUT_AT, MODEL, QUESTION, RESULT, TOO_LONG, URL, Address, Seen, Street, error_of, is_wanted

COMMON: dict[str, Any] = {"model": MODEL, "api_base": URL, "api_key": "none", "temperature": 0, "max_retries": 0}
COMMON |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, "timeout": 60}
model = OpenAILike(**COMMON, max_tokens=300)
seen = Seen()


def find(city: str, street: Street, others: list[Street]) -> str:
    """Finds an address."""
    return RESULT


TOOL = FunctionTool.from_defaults(find, fn_schema=Address)
FORCED: dict[str, Any] = {"user_msg": QUESTION, "tool_required": True, "allow_parallel_tool_calls": False}


@seen
def talk() -> object:
    asked = [ChatMessage(content=QUESTION)]
    answer = model.chat(asked).message
    streamed = "".join(each.delta or "" for each in model.stream_chat(asked))
    return [answer.content == streamed, bool(model.chat([*asked, answer, *asked]).message)]


@seen
def structured() -> object:
    predicted = model.structured_predict(Address, PromptTemplate(QUESTION))
    return [is_wanted(predicted), is_wanted(model.as_structured_llm(Address).chat([ChatMessage(content=QUESTION)]).raw)]


@seen
def called() -> object:
    response = model.chat_with_tools([TOOL], **FORCED)
    calls = model.get_tool_calls_from_response(response)
    results = [
        ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": each.tool_id}) for each in calls
    ]
    history = [ChatMessage(content=QUESTION), response.message, *results]
    answer = model.chat_with_tools([TOOL], user_msg=QUESTION, chat_history=history)
    return [[is_wanted(each.tool_kwargs) for each in calls], type(answer).__name__]


@seen
def called_in_a_stream() -> object:
    *_, last = model.stream_chat_with_tools([TOOL], **FORCED)
    return [is_wanted(each.tool_kwargs) for each in model.get_tool_calls_from_response(last)]


@seen
def cut() -> object:
    response = OpenAILike(**COMMON, max_tokens=CUT_AT).chat_with_tools([TOOL], **FORCED)
    return [response.raw.choices[0].finish_reason, bool(response.message.content)]


@seen
def too_long() -> object:
    return error_of(lambda: model.complete(TOO_LONG))


print(json.dumps(seen))
