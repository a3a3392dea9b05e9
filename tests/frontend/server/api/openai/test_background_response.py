"""A response in the background waits for room; generating it again continues its events where they stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import msgspec

from tokenloom.frontend.server.api.openai.background_response import BackgroundResponse
from tokenloom.frontend.server.api.openai.responses import ResponseCreation, encode_events
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.responses import Record, ResponseStore
from tokenloom.ipc.errors import Overloaded
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import new_frontend

_, SPEC = new_frontend(EngineConfig(device="cpu"))
QUEUED = {"id": "resp_1", "status": "queued"}
Turn = list[tuple[str, dict[str, Any]]]


def event(kind: str, status: str) -> tuple[str, dict[str, Any]]:
    return f"response.{kind}", {"response": QUEUED | {"status": status}}


def deltas(*texts: str) -> Turn:
    return [("response.output_text.delta", {"delta": text}) for text in texts]


BEGIN = [event("created", "in_progress"), ("response.output_item.added", {})]
END = [("response.output_item.done", {}), event("completed", "completed")]


class Creation:
    """Creation that yields these turns, after a number of refusals."""

    def __init__(self, *turns: Turn, num_refusals: int = 0) -> None:
        self._turns, self.num_refusals = turns, num_refusals

    async def progress(self) -> AsyncGenerator[Turn, None]:
        if self.num_refusals:
            self.num_refusals -= 1
            raise Overloaded("full", retry_after_s=0.001)
        for turn in self._turns:
            yield turn


def followed(
    folder: Path, creation: Creation, stored: Turn, after: int, end: str = "completed"
) -> list[dict[str, Any]]:
    """Return the events after number `after` of a response, of which `stored` exist already."""
    database = Database.of_engine(msgspec.structs.replace(SPEC, run_directory=str(folder)))
    store = ResponseStore(database, SPEC.config)

    async def start() -> ResponseCreation:
        return cast(ResponseCreation, creation)

    async def work() -> bytes:
        await store.add(Record("resp_1", True, True, b"[]", b"{}", json.dumps(QUEUED).encode()))
        before = list(encode_events(stored, 0))
        await store.update("resp_1", b"", is_open=True, events=before)
        response = BackgroundResponse(store, dict(QUEUED), start, before)
        response.task = asyncio.create_task(response.run())
        received = b"".join([chunk async for chunk in response.follow(after)])
        record = await store.get("resp_1")
        assert record is not None and not record.is_open and json.loads(record.response)["status"] == end
        assert b"".join((await store.events("resp_1"))[after + 1 :]) == received
        return received

    try:
        received = asyncio.run(asyncio.wait_for(work(), 20))
    finally:
        database.close()
    return [json.loads(each.partition(b"data: ")[2]) for each in received.split(b"\n\n") if each]


def test_creation_is_retried_while_the_engine_is_overloaded(tmp_path: Path) -> None:
    creation = Creation(BEGIN, deltas("a"), END, num_refusals=3)
    found = followed(tmp_path, creation, [], -1)
    assert creation.num_refusals == 0 and found[-1]["type"] == "response.completed"


def test_a_repeated_answer_sends_only_new_text(tmp_path: Path) -> None:
    stored = [*BEGIN, *deltas("Li", "ma", " i")]
    again = Creation(BEGIN + deltas("L"), deltas("ima is", ""), deltas(" big"), END)
    found = followed(tmp_path, again, stored, 2)
    assert [each.get("delta") for each in found] == ["ma", " i", "s", "", " big", None, None]
    assert [each["sequence_number"] for each in found] == list(range(3, 10))


def test_an_overload_after_the_first_event_ends_the_response_as_failed(tmp_path: Path) -> None:
    class Late(Creation):
        async def progress(self) -> AsyncGenerator[Turn, None]:
            yield BEGIN
            raise Overloaded("full", retry_after_s=0.001)

    found = followed(tmp_path, Late(), [], -1, "failed")
    assert [each["type"] for each in found] == [*(kind for kind, _ in BEGIN), "response.failed"]
