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
from tokenloom.ipc.sampling_params import SamplingParams
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
async def test_outputs_are_cumulative_and_the_last_one_is_finished(fake: FakeFrontend, client: AsyncClient) -> None:
    outputs = [output async for output in client.generate("p", greedy(), "mine")]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert texts[-1] == expected_text("p", 40)
    assert outputs[-1].request_id == "mine"


@with_client
async def test_requests_without_parameters_get_the_engine_s_defaults(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(defaults={"temperature": 0.25, "max_tokens": 3})
    assert await client.get_default_sampling_params() == SamplingParams(temperature=0.25, max_tokens=3)
    outputs = [output async for output in client.generate("a", priority=7)]
    assert len(outputs[-1].outputs[0].token_ids) == 3
    async for output in client.chat([{"role": "user", "content": "b"}]):
        assert len(output.outputs[0].token_ids) <= 3
    first, second = (submit.params for submit in fake.do(lambda service: service.submits))
    assert (first.temperature, first.priority, second.temperature) == (0.25, 7, 0.25)


@with_client
async def test_each_of_many_tasks_gets_its_own_output(fake: FakeFrontend, client: AsyncClient) -> None:
    outputs = await asyncio.gather(*[last(client, f"p{index}", 1 + index % 50) for index in range(300)])
    for index, output in enumerate(outputs):
        assert output.outputs[0].text == expected_text(f"p{index}", 1 + index % 50)


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
async def test_closing_the_generator_aborts_the_request(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(max_deltas=1)
    stream = client.generate("p", greedy())
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(fake.until, lambda service: service.seen["Abort"] == 1)


@with_client
async def test_an_aborted_request_ends_with_the_tokens_so_far(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(max_deltas=1)
    stream = client.generate("p", greedy(), "mine")
    first = await anext(stream)
    await client.abort("mine")
    output = await anext(stream)
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == first.outputs[0].text


@with_client
async def test_chats_and_queries_get_their_replies(fake: FakeFrontend, client: AsyncClient) -> None:
    turns = [{"role": "user", "content": "hello"}]
    for stream in (client.chat(turns, greedy(5)), client.generate(turns, greedy(5))):
        outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].text == expected_text("hello", 5)
    assert await client.tokenize("hi") == await client.tokenize([{"role": "user", "content": "hi"}]) == [104, 105]
    assert await client.detokenize([104, 105]) == "hi"
    assert (await client.health()).is_ready
    assert (await client.info()).model == "fake"


@with_client
async def test_an_error_is_raised_in_the_task_of_its_request(fake: FakeFrontend, client: AsyncClient) -> None:
    good = asyncio.create_task(last(client, "good", 20))
    with pytest.raises(RequestError, match="forbidden"):
        await last(client, FORBIDDEN, 1)
    with pytest.raises(RequestError, match="no tokens"):
        client.generate([])
    with pytest.raises(RequestError, match="forbidden"):
        await client.tokenize(FORBIDDEN)
    assert (await good).finished


@with_client
async def test_requests_resume_after_the_frontend_is_replaced(fake: FakeFrontend, client: AsyncClient) -> None:
    fake.set(max_deltas=2)
    task = asyncio.create_task(last(client, "p", 40))
    await asyncio.to_thread(fake.until, lambda service: service.is_paused)
    fake.hang_up()
    fake.come_back()
    fake.set(max_deltas=None, is_paused=False)
    assert (await task).outputs[0].text == expected_text("p", 40)


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
