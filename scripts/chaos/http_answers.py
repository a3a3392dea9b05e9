"""Answers of several clients and endpoints over HTTP, each reduced to the parts that must not depend on time.

The clients are curl and the libraries of OpenAI and, if it is installed, Anthropic, which do not retry. A digest joins
the texts of all events by their place. It leaves out ids and times, which differ from one request to the next, and the
numbers of cached and drafted tokens.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

import openai

from tokenloom.scripts.chaos.http_leaver import stay_and_leave

Event: TypeAlias = dict[str, Any]
Digest: TypeAlias = dict[str, Any]

PATIENCE_S = 600.0
_TEXTS = frozenset(("text", "content", "delta", "arguments", "partial_json", "thinking", "reasoning"))
_COUNTS = ("cache", "draft")  # parts of names
_VARIES = frozenset(
    ("id", "created", "created_at", "completed_at", "item_id", "call_id", "obfuscation", "sequence_number", "metrics")
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Ask(NamedTuple):
    """A request, and the client that sends it: curl, openai, anthropic, or a leaver (http_leaver.py)."""

    kind: str
    client: str
    path: str
    body: Event


def leaving(kinds: list[Ask]) -> list[Ask]:
    """Return the streams among these requests, asked for by clients that leave and come back."""
    return [ask._replace(client="leaver") for ask in kinds if ask.body.get("stream") and ask.client == "curl"]


def asks(model: str, num_tokens: int) -> list[Ask]:
    """Return one request of each kind."""
    chat: Event = {"model": model, "max_tokens": num_tokens, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    chat["messages"] = [{"role": "user", "content": "Tell me a long story."}]
    text = {name: value for name, value in chat.items() if name != "messages"} | {"prompt": "Once upon a time"}
    response = {"model": model, "max_output_tokens": num_tokens, "temperature": 0.0, "input": "A story, please."}
    message = {"model": model, "max_tokens": num_tokens, "temperature": 0.0, "messages": chat["messages"]}
    texts = [f"Story number {number} of a city by the sea" for number in range(min(8 * num_tokens, 1000))]
    chats, completions = "/v1/chat/completions", "/v1/completions"
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    called = {"tools": [TOOL], "tool_choice": "required", "ignore_eos": False}
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    has_anthropic = find_spec("anthropic") is not None
    return [
        Ask("chat", "curl", chats, chat | usage),
        Ask("chat of openai", "openai", chats, chat | usage),
        Ask("completion", "curl", completions, text | usage),
        Ask("completion of openai", "openai", completions, text | usage),
        Ask("logprobs", "curl", completions, text | usage | {"logprobs": 2}),
        Ask("chat logprobs", "curl", chats, chat | usage | {"logprobs": True, "top_logprobs": 2}),
        Ask("n = 2", "curl", chats, chat | usage | {"n": 2}),
        Ask("tools", "curl", chats, chat | usage | called),
        Ask("invocation", "curl", "/invocations", chat | usage),
        Ask("whole", "curl", chats, chat),
        Ask("whole logprobs", "curl", completions, text | {"logprobs": 1}),
        Ask("response", "curl", "/v1/responses", response | {"stream": True}),
        Ask("response logprobs", "openai", "/v1/responses", response | {"stream": True} | scored),
        Ask("embeddings", "curl", "/v1/embeddings", {"model": model, "input": texts}),
        Ask("reranking", "curl", "/rerank", {"model": model, "query": "A story, please.", "documents": texts}),
        Ask("message", "curl", "/v1/messages", message | {"stream": True}),
        Ask("message again", "anthropic" if has_anthropic else "curl", "/v1/messages", message | {"stream": True}),
    ]


async def answer(ask: Ask, url: str) -> Digest:
    """Send a request and return the digest of its answer. An error if it was cut."""
    if ask.client == "curl":
        events = _parse(await _curl(ask, url))
    elif ask.client == "leaver":
        events = _parse(await stay_and_leave(ask.path, ask.body, url, PATIENCE_S))
    elif ask.client == "anthropic":
        events = [event async for event in _of_anthropic(ask, url)]
    else:
        events = [event async for event in _of_openai(ask, url)]
    return digest(events)


async def _curl(ask: Ask, url: str) -> bytes:
    words = ["curl", "-sSN", "--fail-with-body", f"{url}{ask.path}", "-H", "content-type: application/json", "-d", "@-"]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(json.dumps(ask.body).encode()), PATIENCE_S)
    if process.returncode:
        raise ConnectionError(f"curl: {errors.decode().strip()} {output[-200:].decode(errors='replace')}")
    return output


def _parse(output: bytes) -> list[Event]:
    """Return the events of a stream, which must end as it should, or the one body of a whole answer."""
    if output.startswith(b"{"):
        return [json.loads(output)]
    lines = [line.removeprefix(b"data: ") for line in output.split(b"\n") if line.startswith(b"data: ")]
    if (
        lines.count(b"[DONE]") + sum(b'"response.completed"' in line or b'"message_stop"' in line for line in lines)
        != 1
    ):
        raise ConnectionError(f"the stream has not one end: {output[-200:]!r}")
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def _of_openai(ask: Ask, url: str) -> AsyncIterator[Event]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
        body = {name: value for name, value in ask.body.items() if name != "ignore_eos"}
        create: Any = client.chat.completions.create
        if "prompt" in body:
            create = client.completions.create
        elif "input" in body:
            create = client.responses.create
        async for event in await create(**body, extra_body={"ignore_eos": True}):
            yield event.model_dump()


async def _of_anthropic(ask: Ask, url: str) -> AsyncIterator[Event]:
    library: Any = importlib.import_module("anthropic")
    async with library.AsyncAnthropic(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
        create: Any = client.messages.create
        async for event in await create(**ask.body):
            yield event.model_dump()


def digest(events: list[Event]) -> Digest:
    """Join the texts and lists of events by their place; of other values keep the last."""
    found: Digest = {}
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    if numbers != list(range(len(numbers))):
        raise ConnectionError(f"sequence_number has a gap: {numbers}")
    for event in events:
        for place, key, value in _leaves(event, str(event.get("type", ""))):
            if key in _TEXTS and isinstance(value, str):
                found[place] = found.get(place, "") + value
            elif isinstance(value, list):
                found[place] = found.get(place, []) + value
            elif value is not None:
                found[place] = value
    return found


def _leaves(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """Yield place, key and value of each leaf. Elements of lists are told apart by their `index`, if they have one."""
    for key, each in value.items():
        below = f"{place}/{key}"
        if _varies(key):
            continue
        if isinstance(each, dict):
            yield from _leaves(each, below)
        elif isinstance(each, list) and each and all(isinstance(one, dict) and "index" in one for one in each):
            for one in each:
                yield from _leaves(one, f"{below}/{one['index']}")
        elif isinstance(each, list) and each and all(isinstance(one, dict) for one in each):
            yield below, key, [_without_ids(one) for one in each]
        else:
            yield below, key, each


def _varies(key: str) -> bool:
    return key in _VARIES or any(part in key for part in _COUNTS)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(each) for key, each in value.items() if not _varies(key)}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value
