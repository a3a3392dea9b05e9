"""Ollama's client for Python, unpatched, against the server at argv[1]; prints its results as JSON."""

import asyncio
import json
import sys
from typing import Any

import ollama
from wanted import ADDRESS, MODEL, QUESTION, RESULT, Address, Seen

HOST = sys.argv[1]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 300, "num_ctx": 2048}
CALL = {"name": "find", "parameters": ADDRESS}  # as the engine's parser reads calls
CALLED: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"const": "find"}, "parameters": Address.model_json_schema()},
    "required": ["name", "parameters"],
    "additionalProperties": False,
    "$defs": Address.model_json_schema()["$defs"],
}
client = ollama.Client(host=HOST)
seen = Seen()


def find(city: str) -> str:
    """Finds an address.

    Args:
        city: where to look
    """
    return RESULT


@seen
def talk() -> object:
    answer = client.chat(MODEL, ASKED, options=OPTIONS)
    again = client.chat(MODEL, [*ASKED, answer.message, *ASKED], options=OPTIONS)
    return [answer.message.content, answer.done_reason, answer.eval_count > 0, answer.total_duration > 0, again.done]


@seen
def streamed() -> object:
    parts = list(client.chat(MODEL, ASKED, stream=True, options=OPTIONS))
    return ["".join(each.message.content for each in parts), [each.done for each in parts][-1], len(parts) > 2]


@seen
def awaited() -> object:
    async def ask() -> str:
        stream = await ollama.AsyncClient(host=HOST).chat(MODEL, ASKED, stream=True, options=OPTIONS)
        return "".join([part.message.content async for part in stream])

    return asyncio.run(ask())


@seen
def generated() -> object:
    whole = client.generate(MODEL, QUESTION, options=OPTIONS)
    parts = client.generate(MODEL, QUESTION, stream=True, options=OPTIONS)
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=OPTIONS | {"num_predict": 2})
    return [whole.response, "".join(each.response for each in parts), raw.response, raw.done_reason]


@seen
def structured() -> object:
    answer = client.chat(MODEL, ASKED, format=Address.model_json_schema(), options=OPTIONS)
    return Address.model_validate_json(answer.message.content).model_dump() == ADDRESS


@seen
def called() -> object:
    answer = client.chat(MODEL, ASKED, tools=[find], format=CALLED, options=OPTIONS)
    (call,) = answer.message.tool_calls
    result = {"role": "tool", "content": find(city="Lima"), "tool_name": call.function.name}
    after = client.chat(MODEL, [*ASKED, answer.message, result], tools=[find], options=OPTIONS | {"num_predict": 8})
    streamed_calls = [
        each.function.arguments == ADDRESS
        for part in client.chat(MODEL, ASKED, tools=[find], format=CALLED, stream=True, options=OPTIONS)
        for each in part.message.tool_calls or ()
    ]
    return [call.function.name, dict(call.function.arguments) == ADDRESS, after.done, streamed_calls]


@seen
def embedded() -> object:
    both = client.embed(MODEL, ["Lima", "Oslo"])
    one = client.embeddings(MODEL, "Lima")
    gap = max(abs(a - b) for a, b in zip(both.embeddings[0], one.embedding, strict=True))
    return [len(both.embeddings), gap < 1e-3, both.prompt_eval_count > 0]


@seen
def listed() -> object:
    shown = client.show(MODEL)
    pulled = [each.status for each in client.pull(MODEL, stream=True)]
    running = client.ps().models[0]
    return [client.list().models[0].model, running.model, "completion" in shown.capabilities, pulled[-1]]


@seen
def refused() -> object:
    def status_of(*arguments: Any, **more: Any) -> object:
        try:
            return client.chat(*arguments, **more)
        except ollama.ResponseError as error:
            return [error.status_code, "not served" in error.error or "temperature" in error.error]

    return [status_of("llama3", ASKED), status_of(MODEL, ASKED, options={"temperature": -1})]


print(json.dumps(seen))
