"""A request that kills frontends ends alone: after two deaths it is refused by name."""

from __future__ import annotations

import contextlib
import json

import httpx2
import pytest

from tokenloom import Client, SamplingParams
from tokenloom.frontend.launcher.supervisor.replicas.restart_policy import MAX_FAILURES
from tokenloom.ipc.notes.deadly import LOSSES_TO_REFUSE
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import KEY, open_http

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PATIENCE_S = 90.0  # for an answer that outlives frontends
REFUSAL = r"2 frontends have ended while they worked on this request, so it is refused"


def num_frontends_lost(engine: Engine) -> int:
    """Count the ends of frontends. The next may come before a frontend is back."""
    return engine.errors.read_text(encoding="utf-8").count(" ERROR supervisor: frontend ")


def post(engine: Engine, body: bytes) -> httpx2.Response | None:
    """Send a body to the completions; None if the connection was cut."""
    with contextlib.suppress(httpx2.RemoteProtocolError, httpx2.ReadError), open_http(engine.url, KEY) as http:
        return http.post("/v1/completions", content=body, timeout=PATIENCE_S)
    return None


@pytest.mark.parametrize("kind", ["abort", pytest.param("hang", marks=pytest.mark.nightly)])
def test_a_body_that_kills_frontends_is_refused_after_two_and_others_go_on(engine: Engine, kind: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2, "user": "u" * (500 + len(kind))}).encode()
    before = num_frontends_lost(engine)
    with Client(engine.address) as client:
        (calm,) = client.generate("The capital of France is", LONG)
        fault = inject(engine.faults, "frontend.read", f"{kind} always", len(body))
        stream = client.stream("The capital of France is", LONG)
        text = next(stream)
        for _ in range(2):  # its connection outlives the frontends; the next one kills none
            refused = post(engine, body)
            assert refused is not None and refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "deadly_request" and error["message"].startswith(REFUSAL.replace("\\", ""))
        assert text + "".join(stream) == calm.outputs[0].text
    fault.unlink()
    wait_until(lambda: num_frontends_lost(engine) - before == LOSSES_TO_REFUSE)


@pytest.mark.nightly
def test_a_caller_whose_requests_all_kill_a_frontend_does_not_end_the_engine(engine: Engine) -> None:
    for number in range(MAX_FAILURES + 3):
        body = json.dumps({"prompt": "x" * number, "user": "u" * 900}).encode()
        inject(engine.faults, "frontend.read", "abort", len(body))
        outlived = post(engine, body)
        assert outlived is not None and outlived.status_code == 200
    answer = post(engine, json.dumps({"prompt": "x", "max_tokens": 2}).encode())
    assert answer is not None and answer.status_code == 200
