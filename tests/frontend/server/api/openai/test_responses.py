"""The events of a response begin with its first item; an error before them is raised, a later one is an event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.responses import ResponseErrorEvent

from tokenloom.frontend.forms.openai.items import Event
from tokenloom.frontend.server.api.openai.responses import BEGIN, ResponseCreation
from tokenloom.ipc.errors import EngineDead, RequestError

BEGUN: list[Event] = [(kind, {"response": {}}) for kind in BEGIN]
ADDED: Event = ("response.output_item.added", {"output_index": 0})


class Creation(ResponseCreation):
    """Creation that yields these turns and then raises `error`."""

    def __init__(self, error: Exception, *turns: list[Event]) -> None:
        self._error, self._turns = error, turns
        self._chat: Any = SimpleNamespace(has_logprobs=False)

    async def progress(self) -> AsyncGenerator[list[Event], None]:
        for turn in self._turns:
            yield turn
        raise self._error


def events(creation: ResponseCreation) -> list[dict[str, Any]]:
    async def collect() -> bytes:
        return b"".join([chunk async for chunk in creation.events()]) + creation.end()

    return [json.loads(line[6:]) for line in asyncio.run(collect()).split(b"\n") if line.startswith(b"data: ")]


def test_an_error_before_the_first_item_sets_the_status() -> None:
    with pytest.raises(RequestError, match="bad schema"):
        events(Creation(RequestError("bad schema"), BEGUN, []))


def test_a_later_error_is_an_event_that_clients_know() -> None:
    sent = events(Creation(EngineDead("worker 0 was killed"), BEGUN, [], [ADDED]))
    assert [event["type"] for event in sent] == [*BEGIN, ADDED[0], "error"]
    last = ResponseErrorEvent.model_validate(sent[-1], strict=True)
    assert (last.message, last.code, last.sequence_number) == ("worker 0 was killed", "engine_unavailable", 3)
    assert sent[-1]["error"]["message"] == last.message  # what openai's client raises
