"""Whole and streamed messages have the same blocks, stop reason and usage; a late error is an event."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin, CallEnd, Content, Part
from tokenloom.frontend.server.api.anthropic import MessageCreation
from tokenloom.frontend.server.api.openai.run import Run
from tokenloom.ipc.errors import EngineDead, Overloaded
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import Delta

BODY = msgspec.convert({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}, MessagesRequest)
CALL: list[Part] = [CallBegin("f"), Arguments('{"a": 1}'), CallEnd("")]
TORN: list[Part] = [CallBegin("f"), Arguments('{"a": 1'), CallEnd("")]
Turn = list[tuple[list[Part], Delta]] | Exception


class Chat:
    """ChatCompletion with a known answer, turn by turn."""

    id, model = "chatcmpl-1", "m"

    def __init__(
        self, *turns: Turn, num_tokens: int = 5, num_prompt: int = 40, num_cached: int = 16, block_size: int = 16
    ) -> None:
        self._turns = turns
        self._run = Run(1, 1, block_size)
        self._run._prompts, self._run.num_cached_tokens = [bytes(4 * num_prompt)], num_cached
        self._run.num_completion_tokens, self._run.num_thought_tokens = num_tokens, 2

    @contextlib.contextmanager
    def run(self) -> Iterator[Any]:
        yield self._run

    async def parts(self, run: object) -> AsyncGenerator[Any, None]:
        for turn in self._turns:
            if isinstance(turn, Exception):
                raise turn
            yield turn


def ended(parts: list[Part], reason: FinishReason, stopped_at: int | str | None = None) -> Turn:
    return [(parts, Delta(request_id="r", finish_reason=reason, stop_reason=stopped_at))]


def whole(*turns: Turn, **numbers: int) -> dict[str, Any]:
    chat: Any = Chat(*turns, **numbers)
    found: dict[str, Any] = json.loads(asyncio.run(MessageCreation(BODY, chat).whole()))
    return found


def events(*turns: Turn, **numbers: int) -> list[dict[str, Any]]:
    async def read() -> bytes:
        chat: Any = Chat(*turns, **numbers)
        creation = MessageCreation(BODY, chat)
        return b"".join([each async for each in creation.events()]) + creation.end()

    found = []
    for event in asyncio.run(read()).decode().split("\n\n")[:-1]:
        head, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert head == f"event: {body['type']}"
        found.append(body)
    return found


ENDS: list[tuple[list[Part], FinishReason, int | str | None, int, str, str | None]] = [
    ([Content("x")], "stop", None, 5, "end_turn", None),
    ([Content("x")], "stop", 7, 5, "end_turn", None),  # a stop token
    ([Content("x")], "stop", "\n\n", 5, "stop_sequence", "\n\n"),
    ([Content("x")], "length", None, 9, "max_tokens", None),
    ([Content("x")], "length", None, 5, "model_context_window_exceeded", None),
    (CALL, "stop", None, 5, "tool_use", None),
    (CALL, "stop", "\n\n", 5, "tool_use", None),
    (CALL, "length", None, 9, "max_tokens", None),
    (TORN, "stop", "\n\n", 5, "stop_sequence", "\n\n"),
    (TORN, "stop", None, 5, "end_turn", None),
    ([Content("x")], "timeout", None, 5, "timeout", None),
]


@pytest.mark.parametrize(("parts", "finish", "stopped_at", "num_tokens", "reason", "sequence"), ENDS)
def test_answers_have_a_stop_reason(
    parts: list[Part],
    finish: FinishReason,
    stopped_at: int | str | None,
    num_tokens: int,
    reason: str,
    sequence: str | None,
) -> None:
    end = {"stop_reason": reason, "stop_sequence": sequence}
    message = whole(ended(parts, finish, stopped_at), num_tokens=num_tokens)
    *_, delta, stop = events(ended(parts, finish, stopped_at), num_tokens=num_tokens)
    assert message.items() >= end.items() and delta["delta"] == end and stop == {"type": "message_stop"}
    assert message["usage"] == delta["usage"]


@pytest.mark.parametrize(
    ("numbers", "block_size", "expected"),
    [
        ({}, 16, (8, 16, 16)),  # 40 tokens, 16 were found; an equal prompt finds 32
        ({"num_cached": 32}, 16, (8, 0, 32)),
        ({"num_prompt": 32, "num_cached": 0}, 16, (16, 16, 0)),  # the last block is always computed
        ({"num_prompt": 1, "num_cached": 0}, 16, (1, 0, 0)),
        ({"num_cached": 0}, 0, (40, 0, 0)),
    ],
)
def test_usage_counts_reads_and_creations_of_the_prefix_cache(
    numbers: dict[str, int], block_size: int, expected: tuple[int, int, int]
) -> None:
    usage = whole(ended([], "stop"), block_size=block_size, **numbers)["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(usage[name] for name in names) == expected and sum(expected) == numbers.get("num_prompt", 40)
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (5, {"thinking_tokens": 2})


def test_a_stream_begins_with_an_empty_message_and_builds_the_same_blocks() -> None:
    turns: list[Turn] = [[], [([Content("x")], Delta(request_id="r"))], [], ended(CALL, "stop")]
    start, *middle, _, _ = events(*turns)
    assert start["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 40, "output_tokens": 0},
    }
    assert [each["type"].removeprefix("content_block_") for each in middle] == [
        "ping",
        *("start", "delta", "stop") * 2,
    ]
    message = whole(*turns)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert start["message"].keys() == message.keys()


def test_errors_are_raised_before_the_first_event_and_are_events_later() -> None:
    for call in (whole, events):
        with pytest.raises(Overloaded):
            call(Overloaded("full"))
    chat: Any = Chat([], Overloaded("a schema that cannot be"))
    with pytest.raises(Overloaded):
        asyncio.run(anext(MessageCreation(BODY, chat).events()))  # type: ignore[arg-type]
    with pytest.raises(EngineDead):
        whole([], EngineDead("lost"))
    assert events([([Content("x")], Delta(request_id="r"))], EngineDead("lost"))[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "lost"},
    }
