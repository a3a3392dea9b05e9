"""Many submits and aborts are split into slices, so that the event loop serves its sockets in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.forms.openai.schema import ChatRequest, Message
from tokenloom.frontend.listening.keys.api_keys import ApiKeys
from tokenloom.frontend.server.api.openai.local_engine import LocalEngine
from tokenloom.frontend.server.api.openai.run import Run
from tokenloom.frontend.server.api.openai.slices import in_slices
from tokenloom.frontend.server.bodies.body_parser import ParsedBody
from tokenloom.frontend.server.http.access_log import AccessLog
from tokenloom.frontend.server.http.middleware import HttpMiddleware
from tokenloom.frontend.server.requests.frontend import Frontend
from tokenloom.ipc.codec import JsonObject, encode_ids
from tokenloom.ipc.messages.client import Accepted, Delta, RequestMetrics, Submit
from tokenloom.ipc.messages.core import EngineCoreRequest
from tokenloom.ipc.messages.intake import BodyInput
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import new_frontend

SUBMITS = [
    Submit(request_id=f"cmpl-x/{position}", params=SamplingParams(n=2), prompt_token_ids=encode_ids([5]))
    for position in range(6)
]


def new_engine(wake: Callable[[Frontend], None] = lambda frontend: None) -> tuple[LocalEngine, Frontend]:
    """Return an engine with one piece of work in each slice."""
    frontend, _ = new_frontend(EngineConfig(model=str(DEMO_FOLDER)))
    engine = LocalEngine(frontend, lambda: wake(frontend))
    engine.slice_s = 0.0
    return engine, frontend


def test_each_turn_of_the_loop_submits_or_aborts_one_slice() -> None:
    async def run() -> None:
        wakes: list[int] = []
        engine, frontend = new_engine(lambda frontend: wakes.append(frontend.num_open_requests))
        with engine.run(SUBMITS):
            assert frontend.num_open_requests == 1
            while frontend.num_open_requests < len(SUBMITS):
                await asyncio.sleep(0)
            assert wakes == sorted(wakes) and len(set(wakes)) == len(SUBMITS)
        assert frontend.num_open_requests == len(SUBMITS) - 1
        while frontend.num_open_requests:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_usage_gives_the_engines_own_drafts_under_names_of_their_own() -> None:
    async def used(metrics: RequestMetrics) -> JsonObject:
        run = Run(1, 1)
        run.put(0, Accepted(request_id="x", attempt=0, prompt_token_ids=encode_ids([5, 6]), prompt=None, seed=1))
        run.put(0, Delta(request_id="x", token_ids=encode_ids([7]), finish_reason="stop", metrics=metrics))
        async for _ in run.deltas():
            pass
        return run.usage()

    usage = asyncio.run(used(RequestMetrics(num_drafts=9, num_accepted_drafts=5)))
    details = {"reasoning_tokens": 0, "draft_tokens": 9, "accepted_draft_tokens": 5}
    assert usage["completion_tokens_details"] == details, "OpenAI's prediction tokens are billed"
    assert asyncio.run(used(RequestMetrics()))["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_request_that_is_left_before_its_slice_is_not_submitted() -> None:
    async def run() -> None:
        engine, frontend = new_engine()
        with engine.run(SUBMITS):
            pass
        for _ in range(4 * len(SUBMITS)):
            await asyncio.sleep(0)
        assert frontend.num_open_requests == 0 and frontend.counts["requests"] == 1

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("text", ["<think>so far", "<think>so</think> far"])
def test_an_answer_that_continues_a_thought_begins_inside_it(text: str) -> None:
    async def prompt(is_continued: bool) -> BodyInput:
        messages = [Message(role="user", content="x"), Message(role="assistant", content=text)]
        body = ChatRequest(messages=messages, continue_final_message=is_continued)
        return await new_engine()[0].chat_prompt(ParsedBody(body, []))

    assert asyncio.run(prompt(True)).is_inside_thought is (text == "<think>so far")
    assert not asyncio.run(prompt(False)).is_inside_thought


def test_other_tasks_run_between_slices() -> None:
    async def run() -> list[str]:
        order: list[str] = []

        async def other() -> None:
            for _ in range(3):
                order.append("other")
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        found = await in_slices((order.append(f"work {i}") or i for i in range(3)), 0.0)  # type: ignore[func-returns-value]
        await task
        assert found == [0, 1, 2]
        return order

    assert asyncio.run(asyncio.wait_for(run(), 20)) == ["work 0", "other", "work 1", "other", "work 2", "other"]


def test_the_core_learns_which_connection_and_key_a_grammar_is_from() -> None:
    async def callers() -> list[str]:
        engine, frontend = new_engine()

        async def handler(scope: Scope, receive: Receive, send: Send) -> None:
            submit = msgspec.structs.replace(SUBMITS[0], request_id=f"cmpl-{number}")
            runs.enter_context(engine.run([submit]))

        log = AccessLog(HttpMiddleware(handler, ApiKeys(["one", "two"]), 100, lambda why: None), has_all=False)
        with contextlib.ExitStack() as runs:
            for number, (host, key) in enumerate(itertools.product(("10.0.0.1", "10.0.0.2"), ("one", "two"))):
                scope = {"type": "http", "method": "POST", "path": "/v1/completions", "client": (host, 4242 + number)}
                await log(scope | {"headers": [(b"authorization", b"Bearer " + key.encode())]}, None, None)  # type: ignore[arg-type]
            sent = [each for each in frontend.outbox.to_cores[0] if isinstance(each, EngineCoreRequest)]
        return [each.caller for each in sent]

    found = asyncio.run(asyncio.wait_for(callers(), 20))
    assert len(set(found)) == 4 and [each.split()[0] for each in found] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2
    assert not any("one" in each or "two" in each for each in found), "the core needs no key"
