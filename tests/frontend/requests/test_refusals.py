"""Messages that the Frontend refuses, without an effect on other requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Ping, Refused, Unknown
from tokenloom.ipc.messages.client import Child, Deltas, QueryFailed
from tokenloom.tests.frontend.bench import Bench, ids, new_submit


def test_another_protocol_version_is_refused_and_both_are_named(bench: Bench) -> None:
    (refused,) = bench.say(Hello(protocol_version=99), client=b"other")
    assert isinstance(refused, Refused) and "99" in refused.error.message
    assert f"speaks {PROTOCOL_VERSION}" in refused.error.message
    assert bench.say(Ping(), client=b"other") == [Unknown()]


def test_a_message_before_hello_is_answered_with_unknown(bench: Bench) -> None:
    assert bench.say(new_submit(), client=b"other") == [Unknown()] and bench.to_core == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"params": {"temperature": -1}}, r"temperature must be in \[0, 100\], got -1"),
        ({"params": {"top_p": 0}}, "top_p must be in"),
        ({"params": {"tempurature": 1}}, "tempurature"),
        ({"params": {"max_tokens": "many"}}, r"params\.max_tokens"),
        ({"prompt": 5}, r"\$\.prompt"),
    ],
)
def test_an_invalid_field_fails_its_request_and_is_named(bench: Bench, change: dict[str, Any], reason: str) -> None:
    raw = {"type": "submit", "request_id": "mine", "params": {}, "prompt": "x", **change}
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode(raw))
    bench.turn()
    (delta,) = bench.deltas()
    assert delta.request_id == "mine" and delta.finish_reason == "error" and delta.error is not None
    assert delta.error.kind == "request" and re.search(reason, delta.error.message)


@pytest.mark.parametrize("change", [{"mode": "bogus"}, {"model": 5}, {"type": "tokenize", "prompt": 5}])
def test_a_query_with_an_invalid_field_fails_under_its_id(bench: Bench, change: dict[str, Any]) -> None:
    raw = {"type": "control", "query_id": 7, "action": "pause", **change}
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode(raw))
    bench.turn()
    (failed,) = bench.heard()
    assert isinstance(failed, QueryFailed) and (failed.query_id, failed.error.kind) == (7, "request")
    assert re.search(r"\$\.(mode|model|prompt)", failed.error.message)


def test_a_malformed_submit_with_an_open_id_does_not_end_that_request(bench: Bench) -> None:
    key = bench.submit()
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode({"type": "submit", "request_id": "r", "params": 5}))
    bench.tokens((key, 0, ids("The")))
    refused, deltas = bench.heard()
    assert isinstance(refused, Refused) and isinstance(deltas, Deltas) and deltas.deltas[0].text == "The"


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_a_request_id_has_1_to_256_characters(bench: Bench, request_id: str) -> None:
    assert "must have 1 to 256" in bench.refusal(new_submit(request_id)).message


def test_a_request_above_its_share_of_the_queue_is_refused_before_tokenization() -> None:
    bench = Bench(config=EngineConfig(max_waiting_requests=40, max_waiting_tokens=4096))
    long_text = "x " * 3000  # it would be tokenized in a thread
    error = bench.refusal(new_submit("n", prompt=long_text, params={"n": 11}))
    assert error.kind == "request" and "n is 11: one request may have at most 10 answers" in error.message
    error = bench.refusal(new_submit("tokens", prompt_token_ids=encode_ids([5] * 103), params={"n": 10}))
    assert "n is 10 and the prompts have 103 tokens: one request may have at most 1024" in error.message
    bench.submit("fits", prompt_token_ids=encode_ids([5] * 102), params={"n": 10})
    bench.submit("resumed", params={"n": 11}, children=[Child(index=index, seed=1) for index in range(11)])


def test_a_request_error_does_not_affect_other_requests(bench: Bench) -> None:
    key = bench.submit("good")
    assert "5000" in bench.refusal(new_submit("bad", prompt_token_ids=encode_ids([5000]))).message
    assert bench.aborted() == []
    bench.tokens((key, 0, ids("The")))
    assert bench.deltas()[0].text == "The"


def test_a_client_with_too_many_unsent_refusals_is_dropped(bench: Bench) -> None:
    bench.frontend._requests.max_refusals = 3
    for num_refused in range(1, 5):
        assert bench.frontend.counts["clients_slow"] == 0
        bench.frontend.on_client_frame(b"c", encode(new_submit("")))
        assert bench.frontend.counts["refused_requests"] == num_refused
    assert bench.frontend.counts["clients_slow"] == 1 and bench.say(Ping()) == [Unknown()]


def test_when_the_engine_stops_every_open_request_fails_with_the_reason(bench: Bench) -> None:
    bench.submit()
    bench.frontend.stop("stopped by the operator")
    assert bench.refusal() == ErrorInfo("dead", "request r: stopped by the operator")
