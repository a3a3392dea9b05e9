"""AsyncClient against a fake frontend."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tokenloom.frontend.client.async_client import AsyncClient
from tokenloom.frontend.client.outputs import RequestOutput
from tokenloom.ipc.errors import EngineDead, RequestError
from tokenloom.tests.frontend.fake_frontend import DEADLINE_S, FORBIDDEN, FakeFrontend, expected_text, greedy


def with_client(body: Callable[[FakeFrontend, AsyncClient], Awaitable[None]]) -> Callable[[FakeFrontend], None]:
    """Make a test that runs `body` in an event loop with a client of the fake frontend."""

    def test(fake: FakeFrontend) -> None:
        async def main() -> None:
            async with AsyncClient(fake.address) as client:
                await body(fake, client)

        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))

    return test


async def last(client: AsyncClient, prompt: str, max_tokens: int) -> RequestOutput:
    return [output async for output in client.generate(prompt, greedy(max_tokens))][-1]


@with_client
async def test_outputs_are_cumulative_and_have_the_engines_defaults(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(defaults={"max_tokens": 40})
    outputs = [output async for output in client.generate("p", request_id="mine")]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert texts[-1] == expected_text("p", 40)
    assert outputs[-1].request_id == "mine"
    *_, turn = [output async for output in client.chat([{"role": "user", "content": "p"}])]
    assert turn.outputs[0].text == texts[-1]


@with_client
async def test_an_aborted_request_ends_with_the_tokens_so_far(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(max_deltas=1)
    stream = client.generate("p", greedy(), "mine")
    first = await anext(stream)
    await client.abort("mine")
    (answer,) = (await anext(stream)).outputs
    assert (answer.finish_reason, answer.text) == ("abort", first.outputs[0].text)


@with_client
async def test_updates_for_a_slow_consumer_are_merged_into_one_output(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(max_deltas=1)
    stream = client.generate("p", greedy(400))
    await anext(stream)
    fake.set(max_deltas=None, is_paused=False)
    await last(client, "another that ends later", 400)
    output = await anext(stream)
    assert output.finished
    assert output.outputs[0].text == expected_text("p", 400)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@with_client
async def test_cancelling_the_task_aborts_the_request(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(is_paused=True)
    task = asyncio.create_task(last(client, "p", 10))
    await asyncio.to_thread(fake.until, lambda service: service.seen["Submit"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(fake.until, lambda service: service.seen["Abort"] == 1)


@with_client
async def test_queries_get_replies_and_an_error_is_raised_in_the_task_of_its_request(
    fake: FakeFrontend, client: AsyncClient
) -> None:
    good = asyncio.create_task(last(client, "good", 20))
    with pytest.raises(RequestError, match="forbidden"):
        await last(client, FORBIDDEN, 1)
    with pytest.raises(RequestError, match="no tokens"):
        client.generate([])
    with pytest.raises(RequestError, match="forbidden"):
        await client.tokenize(FORBIDDEN)
    assert (await good).finished
    assert await client.detokenize(await client.tokenize("hi")) == "hi" and (await client.health()).is_ready


def test_event_loops_use_one_client_in_turn(fake: FakeFrontend) -> None:
    before = set(threading.enumerate())
    client = AsyncClient(fake.address)
    for number in range(3):
        output = asyncio.run(asyncio.wait_for(last(client, f"p{number}", 20), DEADLINE_S))
        assert output.outputs[0].text == expected_text(f"p{number}", 20)
    asyncio.run(client.close())
    asyncio.run(client.close())
    assert set(threading.enumerate()) == before


def test_a_loop_that_ends_aborts_its_open_request(fake: FakeFrontend) -> None:
    with AsyncClient(fake.address) as client:
        fake.set(max_deltas=1)

        async def leave() -> None:
            await anext(client.generate("p", greedy()))

        asyncio.run(asyncio.wait_for(leave(), DEADLINE_S))
        fake.until(lambda service: service.seen["Abort"] == 1)
        fake.set(max_deltas=None, is_paused=False)
        assert asyncio.run(asyncio.wait_for(last(client, "q", 5), DEADLINE_S)).finished


def test_without_an_engine_the_first_request_raises_engine_dead(tmp_path: Path) -> None:
    async def main() -> None:
        client = AsyncClient(f"ipc://{tmp_path}/none", connect_timeout_s=0.2)
        with pytest.raises(EngineDead, match="no engine answers"):
            await last(client, "p", 1)
        await client.close()
        with pytest.raises(EngineDead):
            async with AsyncClient(f"ipc://{tmp_path}/none", connect_timeout_s=0.2):
                raise AssertionError("not reached")

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
