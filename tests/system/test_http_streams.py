"""Streams that end before their answers."""

from __future__ import annotations

import json
from statistics import median

import httpx2
import pytest

from tokenloom.tests.support.waiting import Deadline, wait_until
from tokenloom.tests.system.http_engine import DEADLINE_S, samples, sent, wait_idle

ENDLESS = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def round_trips_to_abort(http: httpx2.Client, url: str, stream: bool) -> int:
    """Count the scrapes after a disconnect until none of its 8 answers is open."""
    wait_idle(http)
    aborted = samples(http).get("tokenloom_request_success_total{abort}", 0.0)
    body = json.dumps(ENDLESS | {"stream": stream, "n": 8}).encode()
    with sent(url, "/v1/completions", body):
        wait_until(lambda: samples(http)["tokenloom_num_open_answers"] == 8)
    count, deadline = 1, Deadline(DEADLINE_S)
    while samples(http)["tokenloom_num_open_answers"] > 0:
        assert not deadline.has_passed()
        count += 1
    assert samples(http)["tokenloom_request_success_total{abort}"] == aborted + 8
    assert samples(http)["tokenloom_request_aborts_total{disconnect}"] >= 8
    return count


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_the_request_within_3_round_trips(http: httpx2.Client, url: str, stream: bool) -> None:
    """Counted instead of timed, so that it holds on a busy machine; on an idle one the abort takes under 10 ms."""
    assert median(round_trips_to_abort(http, url, stream) for _ in range(3)) <= 3


def test_an_abort_ends_a_stream_with_finish_reason_abort(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True, "request_id": "mine"}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["id"] == "cmpl-mine"
        twice = http.post("/v1/completions", json=ENDLESS | {"request_id": "mine"})
        assert twice.status_code == 400 and "open already" in twice.json()["error"]["message"]
        assert http.post("/abort", json={"request_id": "cmpl-mine"}).json() == {"request_id": "cmpl-mine", "aborted": 1}
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert http.post("/abort", json={"request_id": "cmpl-mine"}).status_code == 404
