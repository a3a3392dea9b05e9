"""A request that kills frontends ends alone: after two deaths it is refused by name, and no caller ends the engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import httpx2
import pytest

from tokenloom import Client, RequestError, SamplingParams
from tokenloom.ipc.messages.deadly import LOSSES_TO_REFUSE
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.system.http_engine import KEY, open_http

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
REFUSAL = r"2 frontends have ended while they worked on this request, so it is refused"


@pytest.fixture(autouse=True)
def no_fault_stays(engine: Engine) -> Iterator[None]:
    yield
    for path in engine.faults.iterdir():
        path.unlink()


def num_frontends_lost(engine: Engine) -> int:
    return engine.errors.read_text(encoding="utf-8").count(" supervisor: frontend is back\n")


def post(engine: Engine, body: bytes) -> httpx2.Response | None:
    """Send a body to the completions; None if the connection was cut."""
    with contextlib.suppress(httpx2.RemoteProtocolError, httpx2.ReadError), open_http(engine.url, KEY) as http:
        return http.post("/v1/completions", content=body)
    return None


@pytest.mark.parametrize("kind", ["abort", pytest.param("hang", marks=pytest.mark.nightly)])
def test_a_body_that_kills_frontends_is_refused_after_two_and_others_go_on(engine: Engine, kind: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2, "user": "u" * (500 + len(kind))}).encode()
    before = num_frontends_lost(engine)
    with Client(engine.address) as client:
        (calm,) = client.generate("The capital of France is", LONG)
        inject(engine.faults, "frontend.read", f"{kind} always", len(body))
        stream = client.stream("The capital of France is", LONG)
        text = next(stream)
        answers = [post(engine, body) for _ in range(LOSSES_TO_REFUSE)]
        assert answers == [None] * LOSSES_TO_REFUSE
        refused = post(engine, body)
        assert refused is not None and refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "deadly_request" and error["message"].startswith(REFUSAL.replace("\\", ""))
        assert text + "".join(stream) == calm.outputs[0].text
    assert num_frontends_lost(engine) - before == LOSSES_TO_REFUSE


def test_the_library_brings_back_a_request_that_kills_frontends_only_once(engine: Engine) -> None:
    prompt = "a b c d e f g h x x x x x"
    before = num_frontends_lost(engine)
    with Client(engine.address) as client, Client(engine.address) as other:
        (calm,) = other.generate("The capital of France is", LONG)
        inject(engine.faults, "frontend.open", "abort always", len(client.tokenize(prompt)))
        stream = other.stream("The capital of France is", LONG)
        text = next(stream)
        with pytest.raises(RequestError, match=REFUSAL):
            client.generate(prompt, SamplingParams(max_tokens=5))
        assert text + "".join(stream) == calm.outputs[0].text
        (again,) = client.generate("The capital of France is", LONG)
        assert again.outputs[0].text == calm.outputs[0].text
    assert num_frontends_lost(engine) - before == LOSSES_TO_REFUSE
