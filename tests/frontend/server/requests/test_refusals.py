"""Messages that the Frontend refuses, without an effect on other requests."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.server.requests.large_frame import LARGE_BYTES, MAX_TURNS, check_large_frame, message_id
from tokenloom.ipc.codec import encode, encode_ids
from tokenloom.ipc.errors import ErrorInfo, ProtocolError
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Ping, Refused, Unknown
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, Child, Deltas, QueryFailed, Submit, TextPart
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.bench import Bench, ids, new_submit


def test_another_protocol_version_is_refused_and_messages_without_hello_are_answered_with_unknown(
    bench: Bench,
) -> None:
    (refused,) = bench.say(Hello(protocol_version=99), client=b"other")
    assert isinstance(refused, Refused) and "99" in refused.error.message
    assert f"speaks {PROTOCOL_VERSION}" in refused.error.message
    for message in (Ping(), new_submit()):
        assert bench.say(message, client=b"other") == [Unknown()] and bench.to_core == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"params": {"temperature": -1}}, r"temperature must be in \[0, 100\], got -1"),
        ({"params": {"top_p": 0}}, "top_p must be in"),
        ({"params": {"tempurature": 1}}, "tempurature"),
        ({"params": {"max_tokens": "many"}}, r"params\.max_tokens"),
        ({"prompt": 5}, r"\$\.prompt"),
        ({"type": "control", "mode": "bogus"}, r"\$\.mode"),
        ({"type": "control", "model": 5}, r"\$\.model"),
        ({"type": "tokenize", "prompt": 5}, r"\$\.prompt"),
    ],
)
def test_an_invalid_field_fails_its_request_or_query_and_is_named(
    bench: Bench, change: dict[str, Any], reason: str
) -> None:
    request = {"type": "submit", "request_id": "mine", "params": {}, "prompt": "x"}
    fields = {"query_id": 7, "action": "pause"} if "type" in change else request
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode(fields | change))
    bench.turn()
    (reply,) = bench.heard()
    if isinstance(reply, Deltas):
        (delta,) = reply.deltas
        assert (delta.request_id, delta.finish_reason) == ("mine", "error") and delta.error is not None
        error = delta.error
    else:
        assert isinstance(reply, QueryFailed) and reply.query_id == 7
        error = reply.error
    assert error.kind == "request" and re.search(reason, error.message)


def test_a_malformed_submit_ends_no_open_request_of_its_id_nor_others(bench: Bench) -> None:
    key = bench.submit()
    for request_id in ("", "x" * 257):
        assert "must have 1 to 256" in bench.refusal(new_submit(request_id)).message
    assert "5000" in bench.refusal(new_submit("bad", prompt_token_ids=encode_ids([5000]))).message
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode({"type": "submit", "request_id": "r", "params": 5}))
    bench.tokens((key, 0, ids("The")))
    refused, deltas = bench.heard()
    assert isinstance(refused, Refused) and isinstance(deltas, Deltas) and deltas.deltas[0].text == "The"


def test_a_request_above_its_share_of_the_queue_is_refused_before_tokenization() -> None:
    bench = Bench(config=EngineConfig(max_waiting_requests=40, max_waiting_tokens=4096))
    long_text = "x " * 3000  # it would be tokenized in a thread
    error = bench.refusal(new_submit("n", prompt=long_text, params={"n": 11}))
    assert error.kind == "request" and "n is 11: one request may have at most 10 answers" in error.message
    error = bench.refusal(new_submit("tokens", prompt_token_ids=encode_ids([5] * 103), params={"n": 10}))
    assert "n is 10 and the prompts have 103 tokens: one request may have at most 1024" in error.message
    bench.submit("fits", prompt_token_ids=encode_ids([5] * 102), params={"n": 10})
    bench.submit("resumed", params={"n": 11}, children=[Child(index=index, seed=1) for index in range(11)])


def test_a_client_with_too_many_unsent_refusals_is_dropped(bench: Bench) -> None:
    bench.frontend._requests.max_refusals = 3
    for num_refused in range(1, 5):
        assert bench.frontend.counts["clients_slow"] == 0
        bench.frontend.on_client_frame(b"c", encode(new_submit("")))
        assert bench.frontend.counts["refused_requests"] == num_refused
    assert bench.frontend.counts["clients_slow"] == 1 and bench.say(Ping()) == [Unknown()]


def test_tokens_that_come_again_do_not_count_as_refusals(bench: Bench) -> None:
    bench.frontend._requests.max_refusals = 3
    resumed = new_submit("resumed", children=[Child(seed=1, output_token_ids=encode_ids([5] * 9))], has_echo=True)
    for submit in (resumed, new_submit("")):
        bench.frontend.on_client_frame(b"c", encode(submit))
    (session,) = bench.frontend._sessions
    assert (len(session.echoes), len(session.refusals)) == (9, 1) and bench.frontend.counts["clients_slow"] == 0


def test_when_the_engine_stops_every_open_request_fails_with_the_reason(bench: Bench) -> None:
    bench.submit()
    bench.frontend.stop("stopped by the operator")
    assert bench.refusal() == ErrorInfo("dead", "request r: stopped by the operator")


# ── large frames ─────────────────────────────────────────────────────────────────────────────────────────────────────

TURN = ChatMessage("user", "a")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chat": [TURN] * (MAX_TURNS + 1)}, f"chat has {MAX_TURNS + 1} entries, at most {MAX_TURNS}"),
        ({"chat": [ChatMessage("user", [TextPart("a")] * (MAX_TURNS // 2 + 1))] * 2}, f"has {MAX_TURNS + 2} entries"),
        ({"prompt": "x", "children": [Child()] * 300_000}, "children has 300000 entries, at most 128"),
        ({"prompt": "x", "params": SamplingParams(allowed_token_ids=[2**30] * 300_000)}, "params has 1500"),
        ({"chat": [TURN], "chat_form": ChatForm(variables={"x": [[]] * 1_100_000})}, "chat_form has 1100"),
        ({"chat": [TURN, ChatMessage("user", "a", {"x": [0] * 600_000})] * 2}, "chat[…].more has 1200"),
    ],
)
def test_too_many_values_are_refused_with_field_and_number(bench: Bench, fields: dict[str, Any], reason: str) -> None:
    submit = Submit(**{"request_id": "mine", "params": SamplingParams(), **fields})
    assert len(encode(submit)) > LARGE_BYTES
    error = bench.refusal(submit)
    assert error.kind == "request" and reason in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * LARGE_BYTES},
        {"prompt_token_ids": bytes(LARGE_BYTES)},
        {"chat": [TURN] * MAX_TURNS},
        {"chat": [ChatMessage("user", [TextPart("a")] * (MAX_TURNS // 2))] * 2},
        {"chat": [TURN, ChatMessage("user", "a", {"x": [0] * 250_000})] * 2},
        {"chat": [TURN] * 15 + [ChatMessage("user", "a" * LARGE_BYTES)]},
        {"prompt": "x", "params": SamplingParams(allowed_token_ids=[2**30] * 200_000)},
    ],
)
def test_large_texts_and_token_ids_pass(fields: dict[str, Any]) -> None:
    check_large_frame(encode(Submit(**{"request_id": "mine", "params": SamplingParams(), **fields})))


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1" * LARGE_BYTES, b"\xdd\xff\xff\xff\xff", b"\x81\xa4chat\xdd\xff\xff\xff\xff"]
)
def test_an_invalid_frame_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        check_large_frame(frame)
    assert message_id(frame) is None
