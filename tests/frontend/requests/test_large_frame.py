"""A large frame with too many values is refused under its request's id before it is decoded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenloom.frontend.requests.large_frame import LARGE_BYTES, MAX_TURNS, check_large_frame, message_id
from tokenloom.ipc.codec import encode
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, Child, Submit, TextPart
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.frontend.bench import Bench

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


def test_the_id_of_a_malformed_message_is_found() -> None:
    assert message_id(msgspec.msgpack.encode({"params": [1] * 100, "request_id": "r", "type": "submit"})) == "r"
    assert message_id(msgspec.msgpack.encode({"type": "tokenize", "query_id": 7, "prompt": 5})) == 7
    assert message_id(msgspec.msgpack.encode({"type": "submit", "request_id": 5})) is None
