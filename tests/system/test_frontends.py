"""An engine of two frontends: any of them serves all, and the loss of one changes no answer and no sum."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.chaos_work import Work, difference, make_work
from tokenloom.tests.system.launched import serve

DEADLINE_S = 60.0
OPTIONS = ["--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--num-kv-blocks", "256"]
PROCESSES = ("frontend", "frontend 1")
LONG = {"input": "Hi", "background": True, "stream": True, "ignore_eos": True, "max_output_tokens": 400}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = [*OPTIONS, "--frontends", "2", "--http", "0", "--hang-timeout-s", "2"]
    yield from serve(Engine(tmp_path_factory.mktemp("frontends"), options))


@pytest.fixture
def doors(engine: Engine) -> Iterator[list[httpx2.Client]]:
    """HTTP clients of each frontend alone, over the sockets that the frontends have for each other."""
    with ExitStack() as stack:
        (folder,) = (engine.runtime / "tokenloom").glob("????????")
        paths = [str(folder / f"http-{place}.sock") for place in (0, 1)]
        made = [
            httpx2.Client(transport=httpx2.HTTPTransport(uds=path), base_url="http://e", timeout=30) for path in paths
        ]
        yield [stack.enter_context(each) for each in made]


def open_answers(door: httpx2.Client) -> list[dict[str, Any]]:
    """Return the open answers of all frontends; others write theirs once a second."""
    return list(door.get("/dashboard/data").json()["open"])


def num_returns(engine: Engine, name: str) -> int:
    return engine.errors.read_text(encoding="utf-8").count(f" supervisor: {name} is back\n")


def kill(engine: Engine, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Signal a frontend; return how often it had been replaced before."""
    count = num_returns(engine, name)
    os.kill(engine.child(name).pid, number)
    return count


def wait_back(engine: Engine, name: str, count: int) -> None:
    """Wait until a process was replaced more often than `count`."""
    deadline = time.monotonic() + DEADLINE_S
    while num_returns(engine, name) <= count:
        assert time.monotonic() < deadline, f"{name} is not back"
        time.sleep(0.02)


def answers_of(client: Client, work: list[Work]) -> list[RequestOutput]:
    return client.generate([each.form for each in work], [each.params for each in work], use_tqdm=False)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_streams_of_a_lost_frontend_go_on_at_the_other_with_equal_answers(
    engine: Engine, number: signal.Signals
) -> None:
    assert len(engine.addresses) == 2
    work = make_work(random.Random(5))
    with ExitStack() as stack:
        calm = answers_of(stack.enter_context(Client(engine.address)), work)
        clients = [
            stack.enter_context(Client(places, reconnect_timeout_s=DEADLINE_S))
            for places in (engine.addresses, engine.addresses[::-1]) * 3
        ]
        for name in PROCESSES:
            step = clients[0].health().step
            futures = [clients[index % len(clients)].submit(each.form, each.params) for index, each in enumerate(work)]
            deadline = time.monotonic() + DEADLINE_S
            while clients[0].health().step < step + 15:
                assert time.monotonic() < deadline, "no step ends"
            count = kill(engine, name, number)
            for expected, future in zip(calm, futures, strict=True):
                assert difference(expected, future.result(timeout=DEADLINE_S)) is None
            wait_back(engine, name, count)


def sums(client: Client) -> dict[str, float]:
    names = ("generation_tokens_total", "request_success_total", "engine_steps_total", "e2e_request_latency_seconds")
    found = dict.fromkeys(names, 0.0)
    for metric in client.get_metrics():
        name = metric.name.removeprefix("tokenloom_")
        if name in found:
            found[name] += metric.count if hasattr(metric, "count") else metric.value  # type: ignore[union-attr]
    return found


@pytest.mark.timeout(120)
def test_metrics_are_those_of_all_frontends_at_each_and_outlive_a_loss(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with ExitStack() as stack:
        one, other = (stack.enter_context(Client(place, reconnect_timeout_s=DEADLINE_S)) for place in engine.addresses)
        wait_equal(one, other, sums(one)["generation_tokens_total"])
        before = sums(one)
        one.generate(["a"] * 3, params, use_tqdm=False)
        other.generate(["a"] * 4, params, use_tqdm=False)
        wait_equal(one, other, before["generation_tokens_total"] + 56)
        after = sums(one)
        assert after["request_success_total"] == before["request_success_total"] + 7
        assert after["e2e_request_latency_seconds"] == before["e2e_request_latency_seconds"] + 7
        count = kill(engine, "frontend 1")
        assert sums(one)["generation_tokens_total"] == after["generation_tokens_total"]
        wait_back(engine, "frontend 1", count)
        assert sums(one)["request_success_total"] == after["request_success_total"]
        wait_equal(one, other, after["generation_tokens_total"])
        assert one.health().num_restarts == other.health().num_restarts


def wait_equal(one: Client, other: Client, num_tokens: float) -> None:
    """Wait until both frontends show the same sums, of at least so many tokens."""
    deadline = time.monotonic() + DEADLINE_S
    while not ((found := sums(one)) == sums(other) and found["generation_tokens_total"] >= num_tokens):
        assert time.monotonic() < deadline, (found, sums(other), num_tokens)
        time.sleep(0.05)


@pytest.mark.timeout(120)
def test_http_goes_on_while_frontends_are_lost(engine: Engine) -> None:
    body = {"model": "tokenloom-demo", "prompt": "Hi", "max_tokens": 4, "temperature": 0}
    is_over, texts, failures = threading.Event(), list[str](), list[str]()

    def ask() -> None:
        while not is_over.is_set():
            try:
                answer = httpx2.post(f"{engine.url}/v1/completions", json=body, timeout=20)
                assert answer.status_code == 200, answer.text
                texts.append(answer.json()["choices"][0]["text"])
            except httpx2.TransportError as error:
                failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_S
    for name in PROCESSES:
        num_texts, count = len(texts), kill(engine, name)
        while len(texts) < num_texts + 20:
            assert time.monotonic() < deadline, f"nothing is answered after the loss of {name}: {failures}"
            time.sleep(0.01)
        wait_back(engine, name, count)
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads) and len(set(texts)) == 1
    assert len(failures) <= 2 * len(threads), failures  # those that the lost frontends were answering
    assert not [failure for failure in failures if "Timeout" in failure], "no connection waits for ever"


@pytest.mark.timeout(120)
def test_open_answers_and_background_responses_are_reached_through_any_frontend(
    engine: Engine, doors: list[httpx2.Client]
) -> None:
    one, other = doors
    made = one.post("/v1/responses", json=LONG | {"stream": False}).json()
    path = f"/v1/responses/{made['id']}"
    assert other.get(path).json()["id"] == made["id"]
    assert other.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert one.get(path).json()["status"] == "cancelled"
    with one.stream("POST", "/v1/responses", json=LONG) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                response_id = httpx2.Response(200, content=line[6:]).json()["response"]["id"]
                break
        with other.stream("GET", f"/v1/responses/{response_id}?stream=true") as follow:
            followed = [line for line in follow.iter_lines() if line.startswith("event: ")]
    assert followed[0] == "event: response.created" and followed[-1].endswith(("completed", "incomplete"))

    def ask() -> None:
        body = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "request_id": "long"}
        results.append(one.post("/v1/completions", json=body).json())

    results: list[dict[str, object]] = []
    thread = threading.Thread(target=ask)
    assert other.post("/pause", json={"mode": "keep"}).status_code == 200  # else it may end before the others know it
    deadline = time.monotonic() + DEADLINE_S
    while open_answers(other):  # the response before is still shown for a second
        assert time.monotonic() < deadline
    thread.start()
    while not (shown := open_answers(other)):
        assert time.monotonic() < deadline
    assert len(shown) == 1 and "long" not in str(shown)
    while other.get("/load").json()["server_load"] != 1:
        assert time.monotonic() < deadline
    answer = other.post("/dashboard/abort", json={"key": shown[0]["key"]})
    assert answer.status_code == 200 and answer.json()["aborted"] == 1, answer.text
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and results
    assert one.post("/resume").status_code == 200
    assert other.post("/abort", json={"request_id": "nobody"}).status_code == 404
