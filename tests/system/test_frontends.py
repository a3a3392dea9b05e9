"""An engine of two frontends: any of them serves all, and the loss of one changes no answer and no sum."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.chaos_work import answers, check_equal, make_work
from tokenloom.tests.support.today import at_night
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import RECOVERY_S, lost, reconnecting, served

OPTIONS = ["--dtype", "float32", "--num-kv-blocks", "256", "--frontends", "2", "--http", "0", "--hang-timeout-s", "2"]
CHATS = "/v1/chat/completions"
PROCESSES = ("frontend", "frontend 1")
LONG = {"input": "Hi", "background": True, "stream": True, "ignore_eos": True, "max_output_tokens": 400}


engine = served(*OPTIONS)


@pytest.fixture
def doors(engine: Engine) -> Iterator[list[httpx2.Client]]:
    """HTTP clients of each frontend alone, over the sockets that the frontends have for each other."""
    with ExitStack() as stack:
        (folder,) = (engine.runtime / "tokenloom").glob("????????")
        transports = [httpx2.HTTPTransport(uds=str(folder / f"http-{place}.sock")) for place in (0, 1)]
        made = [httpx2.Client(transport=each, base_url="http://e", timeout=RECOVERY_S) for each in transports]
        yield [stack.enter_context(each) for each in made]


@pytest.fixture
def clients(engine: Engine) -> Iterator[list[Client]]:
    """A client of each frontend alone."""
    with ExitStack() as stack:
        yield [stack.enter_context(reconnecting(engine, place)) for place in (0, 1)]


def read_on(door: httpx2.Client, path: str, begun: threading.Event) -> str:
    """Return a stream's events; set `begun` after the first bytes."""
    received = ""
    with door.stream("GET", path) as stream:
        for part in stream.iter_text():
            begun.set()
            received += part
    return received


def text_of(events: str) -> str:
    """Return the text of the deltas of a stream, which must have one end."""
    bodies = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert bodies.count("[DONE]") + sum('"response.incomplete"' in body for body in bodies) == 1, bodies[-3:]
    found = [json.loads(body) for body in bodies if body != "[DONE]"]
    numbers = [each["sequence_number"] for each in found if "sequence_number" in each]
    assert numbers == list(range(len(numbers)))
    deltas = [each["delta"] for each in found if "delta" in each]
    deltas += [choice["delta"].get("content") or "" for each in found for choice in each.get("choices", ())]
    return "".join(deltas)


def open_answers(door: httpx2.Client) -> list[dict[str, Any]]:
    """Return the open answers of all frontends; others write theirs once a second."""
    return list(door.get("/dashboard/data").json()["open"])


@pytest.mark.parametrize("number", [signal.SIGKILL, *at_night(signal.SIGSTOP)])
def test_streams_of_a_lost_frontend_go_on_at_the_other_with_equal_answers(
    engine: Engine, number: signal.Signals
) -> None:
    assert len(engine.addresses) == 2
    work = make_work(random.Random(5))
    with ExitStack() as stack:
        calm = answers(stack.enter_context(Client(engine.address)), work)
        clients = [
            stack.enter_context(Client(places, reconnect_timeout_s=RECOVERY_S))
            for places in (engine.addresses, engine.addresses[::-1])
        ]
        for name in PROCESSES:
            futures = [clients[index % 2].submit(each.form, each.params) for index, each in enumerate(work)]
            wait_running(clients[0], 15)
            with lost(engine, name, number):
                check_equal(calm, futures)


def sums(client: Client) -> dict[str, float]:
    names = ("generation_tokens_total", "request_success_total", "engine_steps_total", "e2e_request_latency_seconds")
    found = dict.fromkeys(names, 0.0)
    for metric in client.get_metrics():
        name = metric.name.removeprefix("tokenloom_")
        if name in found:
            found[name] += metric.count if hasattr(metric, "count") else metric.value
    return found


def wait_equal(clients: list[Client], num_tokens: float) -> dict[str, float]:
    """Wait until both frontends show the same sums, of at least so many tokens; return them."""

    def found() -> dict[str, float]:
        one, other = map(sums, clients)
        return one if one == other and one["generation_tokens_total"] >= num_tokens else {}

    return wait_until(found, lambda: list(map(sums, clients)))


def test_metrics_are_those_of_all_frontends_at_each_and_outlive_a_loss(engine: Engine, clients: list[Client]) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    before = wait_equal(clients, 0)
    for client, count in zip(clients, (3, 4), strict=True):
        client.generate(["a"] * count, params, use_tqdm=False)
    after = wait_equal(clients, before["generation_tokens_total"] + 56)
    assert after["request_success_total"] == before["request_success_total"] + 7
    assert after["e2e_request_latency_seconds"] == before["e2e_request_latency_seconds"] + 7
    with lost(engine, "frontend 1"):
        assert sums(clients[0])["generation_tokens_total"] == after["generation_tokens_total"]
    again = wait_equal(clients, after["generation_tokens_total"])
    assert again["request_success_total"] == after["request_success_total"]
    assert clients[0].health().num_restarts == clients[1].health().num_restarts


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

    def wait_answered(count: int) -> None:
        wait_until(lambda: len(texts) >= count, lambda: failures, RECOVERY_S)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for name in PROCESSES:
        with lost(engine, name):
            wait_answered(len(texts) + 20)
    is_over.set()
    for thread in threads:
        thread.join(RECOVERY_S)
    assert not any(thread.is_alive() for thread in threads) and len(set(texts)) == 1
    assert len(failures) <= 2 * len(threads), failures  # those that the lost frontends were answering
    assert not [failure for failure in failures if "Timeout" in failure], "no connection waits for ever"


def test_a_stream_that_is_passed_on_outlives_both_frontends(engine: Engine, doors: list[httpx2.Client]) -> None:
    one, other = doors
    told = LONG | {"temperature": 0, "max_output_tokens": 200}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "seed": 4, "max_tokens": 200}
    chat["ignore_eos"] = True
    calm = [text_of(one.post(path, json=body).text) for path, body in (("/v1/responses", told), (CHATS, chat))]
    for names in (["frontend"], ["frontend", "frontend 1"]):
        with one.stream("POST", "/v1/responses", json=told) as stream:
            first = next(line for line in stream.iter_lines() if line.startswith("data: "))
        with one.stream("POST", CHATS, json=chat, headers={"x-stream-resume": "60"}) as stream:
            path = f"/v1/streams/{stream.headers['x-stream-id']}"
        paths = [f"/v1/responses/{json.loads(first[6:])['response']['id']}?stream=true", path]
        with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            door = other
            if len(names) > 1:  # of kept connections, one at each frontend
                door = stack.enter_context(httpx2.Client(base_url=engine.url, timeout=RECOVERY_S))
                paths.insert(0, paths[0])
            begun = [threading.Event() for _ in paths]
            found = [pool.submit(read_on, door, *each) for each in zip(paths, begun, strict=True)]
            for each in begun:
                assert each.wait(RECOVERY_S)
            for name in names:
                stack.enter_context(lost(engine, name))
            texts = [text_of(each.result(RECOVERY_S)) for each in found]
        assert texts == [*calm[:1] * (len(paths) - 1), calm[1]]


def test_open_answers_and_background_responses_are_reached_through_any_frontend(
    engine: Engine, doors: list[httpx2.Client]
) -> None:
    one, other = doors
    path = f"/v1/responses/{one.post('/v1/responses', json=LONG | {'stream': False}).json()['id']}"
    assert other.post(f"{path}/cancel").json()["status"] == one.get(path).json()["status"] == "cancelled"
    with one.stream("POST", "/v1/responses", json=LONG) as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data: "))
        response_id = json.loads(first[6:])["response"]["id"]
        followed = other.get(f"/v1/responses/{response_id}?stream=true").text
    assert followed.startswith("event: response.created") and "event: response.incomplete" in followed
    body = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "request_id": "long"}
    assert other.post("/pause", json={"mode": "keep"}).status_code == 200  # else it may end before the others know it
    wait_until(lambda: not open_answers(other), "the response before is still shown")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one.post, "/v1/completions", json=body)
        (shown,) = wait_until(lambda: open_answers(other))
        assert "long" not in str(shown)
        wait_until(lambda: other.get("/load").json()["server_load"] == 1)
        assert other.post("/dashboard/abort", json={"key": shown["key"]}).json()["aborted"] == 1
        assert answer.result(RECOVERY_S).json()["choices"]
    assert one.post("/resume").status_code == 200
    assert other.post("/abort", json={"request_id": "nobody"}).status_code == 404
