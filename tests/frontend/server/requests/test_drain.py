"""Draining: when the Frontend counts as drained before the engine stops."""

from __future__ import annotations

import asyncio

import pytest

from tokenloom.frontend.server.api.openai.local_engine import LocalEngine
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.messages.base import LEASE_S
from tokenloom.ipc.messages.client import CREDIT_WINDOW, Child, Credit, GetHealth, Health
from tokenloom.ipc.messages.core import Finished
from tokenloom.ipc.messages.supervisor import Drain
from tokenloom.tests.frontend.bench import Bench, new_submit


def drain(bench: Bench, clients_return_s: float = 0.0) -> None:
    bench.frontend.on_control_message(Drain(clients_return_s=clients_return_s))
    bench.turn()


def test_while_draining_only_resumed_requests_are_accepted(bench: Bench) -> None:
    assert bench.frontend.health().state == "ready" and not bench.frontend.is_drained
    drain(bench)
    (health,) = bench.say(GetHealth(query_id=1))
    assert isinstance(health, Health) and not health.is_ready and health.state == "draining"
    error = bench.refusal(new_submit())
    assert error.kind == "draining" and error.retry_after_s > 0
    bench.submit("asked for again", attempt=1)
    bench.submit("resumed elsewhere", children=[Child(seed=1, output_token_ids=encode_ids([40]))])
    assert not bench.frontend.is_drained
    bench.wait(LEASE_S + 1)
    assert bench.frontend.is_drained, "it does not wait for a client that is gone"


def test_draining_ends_when_the_last_delta_is_in_the_outbox_of_a_slow_reader_too(bench: Bench) -> None:
    key = bench.submit()
    for position in range(CREDIT_WINDOW + 5):
        bench.tokens((key, position, [40]))
    drain(bench)
    bench.core(finished=[Finished(key=key, reason="length")])
    assert not bench.frontend.is_drained and bench.deltas()[-1].finish_reason is None
    bench.frontend.on_client_frame(b"c", encode(Credit(count=CREDIT_WINDOW)))
    assert not bench.frontend.is_drained, "the last delta has not been sent"
    bench.turn()
    assert bench.deltas()[-1].finish_reason == "length" and bench.frontend.is_drained


def test_draining_waits_for_a_prompt_in_tokenization() -> None:
    bench = Bench(max_model_len=100_000)
    bench.say(new_submit(prompt="The capital " * 1000))
    drain(bench)
    assert not bench.frontend.is_drained
    bench.wait_for_wakeup()
    key = bench.to_core[-1].children[0].key
    bench.core(accepted=[key], finished=[Finished(key=key, reason="length")])
    assert bench.frontend.is_drained


def test_draining_waits_for_clients_of_a_lost_frontend_to_reconnect(bench: Bench) -> None:
    drain(bench, clients_return_s=3.0)
    assert not bench.frontend.is_drained
    assert bench.frontend.seconds_to_tick(bench.now) == pytest.approx(1.0), "no later than a ping"
    bench.now += 2.5
    assert bench.frontend.seconds_to_tick(bench.now) == pytest.approx(0.5)
    bench.now += 0.5
    assert bench.frontend.is_drained


def test_draining_waits_for_an_http_answer_in_progress(bench: Bench) -> None:
    turns: list[None] = []

    async def ask() -> None:
        engine = LocalEngine(bench.frontend, lambda: turns.append(None))
        with engine.run([new_submit()]):
            bench.turn()
            key = bench.to_core[-1].children[0].key
            drain(bench)
            bench.core(finished=[Finished(key=key, reason="length")])
            assert bench.frontend.num_open_requests == 0 and not bench.frontend.is_drained
            turns.clear()
        assert bench.frontend.is_drained and turns, "the loop must have been woken"

    asyncio.run(ask())
