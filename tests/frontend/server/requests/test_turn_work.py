"""The frontend's work per token, measured in Python calls, messages and writes instead of time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.server.api.openai.local_engine import RUNS_PER_GROUP, LocalEngine
from tokenloom.frontend.server.http.app import GeneratingEndpoints, new_app
from tokenloom.frontend.server.http.peers import Peers
from tokenloom.frontend.server.http.streams.resumable import ResumableStreams
from tokenloom.frontend.server.requests.frontend import Frontend
from tokenloom.frontend.state.database import Database
from tokenloom.frontend.state.responses import ResponseStore
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import (
    CLIENT,
    Calls,
    FrontendSteps,
    new_frontend,
    one_token_each,
    submitted_keys,
)

CONFIG = EngineConfig(model=str(DEMO_FOLDER), max_num_seqs=256)
DEADLINE_S = 30.0
MAX_CALLS_PER_EVENT = 70  # 57 by Python 3.11, the HTTP server's own not counted


@pytest.mark.parametrize(("stop", "max_calls"), [([], 18), (["\n\n", "User:"], 28)])  # 15, 24 by Python 3.11
def test_calls_per_token_and_per_turn_are_bounded_and_a_turn_sends_one_message(stop: list[str], max_calls: int) -> None:
    counts = []
    for num_answers in (8, 256):
        steps = FrontendSteps(CONFIG, num_answers, stop)
        outputs = steps.message()
        with Calls() as calls:
            ((identity, frame),) = steps.turn(outputs)
        counts.append(calls.count)
        assert identity == CLIENT
        assert len(frame) < 100 + 80 * num_answers  # ids of 11 characters, one token and its text
    few, many = counts
    assert (many - few) / (256 - 8) < max_calls
    assert few < 90 + 8 * max_calls


class _Streams:
    """Open streams of an app; counts the writes to each."""

    def __init__(self) -> None:
        self.writes: Counter[int] = Counter()
        self.text: Counter[int] = Counter()
        self._changed = asyncio.Event()

    async def serve(self, app: Any, stream: int, body: bytes) -> None:
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            return pending.pop() if pending else await asyncio.get_running_loop().create_future()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                self.writes[stream] += 1
                self.text[stream] += message["body"].count(b'"text":"')
                self._changed.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app(scope, receive, send)

    async def wait_for(self, num_writes: int) -> None:
        while self.writes.total() < num_writes:
            self._changed.clear()
            await self._changed.wait()


@contextlib.asynccontextmanager
async def _open_streams(num_streams: int) -> AsyncGenerator[tuple[Frontend, _Streams, list[int]], None]:
    """Open streams without tokens yet; yields frontend, streams and the keys of their answers."""
    frontend, spec = new_frontend(CONFIG)
    engine = LocalEngine(frontend, lambda: None)
    peers = Peers(spec, 0)
    store = ResponseStore(Database.of_engine(spec), spec.config)
    generating = GeneratingEndpoints(engine, frontend.metrics, spec, store, peers)
    app = new_app(engine, frontend, spec, generating.endpoints(), peers, ResumableStreams())
    streams = _Streams()
    request = {"prompt": [7, 8, 9], "max_tokens": 100, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    tasks = [asyncio.ensure_future(streams.serve(app, number, body)) for number in range(num_streams)]
    keys: list[int] = []
    while len(keys) < num_streams:
        await asyncio.sleep(0)
        keys += submitted_keys(frontend)
    try:
        yield frontend, streams, keys
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(num_streams: int, num_turns: int) -> list[int]:
    """Return the calls of each turn in which every stream gets one token."""
    counts = []
    async with _open_streams(num_streams) as (frontend, streams, keys):
        for turn in range(num_turns):
            before = streams.writes.total()
            outputs = one_token_each(keys, turn)
            with Calls() as calls:
                frontend.on_core_message(outputs)
                frontend.tick(time.monotonic())
                await streams.wait_for(before + num_streams)
            counts.append(calls.count)
            assert set(streams.writes.values()) == set(streams.text.values()) == {turn + 1}, "one write for each stream"
    return counts


def test_a_turn_writes_once_to_each_stream_with_a_bounded_number_of_calls() -> None:
    async def both() -> tuple[list[int], list[int]]:
        return await _stream(4, 4), await _stream(64, 4)

    few, many = asyncio.run(asyncio.wait_for(both(), DEADLINE_S))
    assert (many[-1] - few[-1]) / (64 - 4) < MAX_CALLS_PER_EVENT


async def _probe_within_a_turn(num_streams: int, num_iterations: int) -> int:
    """Return to how many streams a turn has written after `num_iterations` iterations of the event loop."""
    async with _open_streams(num_streams) as (frontend, streams, keys):
        for turn in range(2):  # the first turn writes the response heads
            before = streams.writes.total()
            frontend.on_core_message(one_token_each(keys, turn))
            frontend.tick(time.monotonic())
            for _ in range(num_iterations):
                await asyncio.sleep(0)
            num_written = streams.writes.total() - before
            await streams.wait_for(before + num_streams)
    return num_written


def test_the_loop_polls_its_sockets_between_groups_of_streams() -> None:
    num_written = asyncio.run(asyncio.wait_for(_probe_within_a_turn(256, 4), DEADLINE_S))
    assert 0 < num_written <= 4 * RUNS_PER_GROUP < 256
