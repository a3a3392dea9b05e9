"""Encoding and decoding are inverse; a malformed frame raises only ProtocolError."""

from __future__ import annotations

import random

import pytest

from tokenloom.ipc.codec import Decoder, decode_ids, encode, encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.base import BulkArray, Hello
from tokenloom.ipc.messages.client import ClientMessage, Submit
from tokenloom.ipc.messages.workers import SchedulerOutput, WorkerToCore
from tokenloom.ipc.params.sampling_params import SamplingParams


def test_messages_survive_a_round_trip() -> None:
    decoder = Decoder[ClientMessage](ClientMessage)
    params = SamplingParams(temperature=0.5, stop=["x"])
    submit = Submit(request_id="a", params=params, prompt_token_ids=encode_ids([1]))
    for message in (submit, Hello(protocol_version=1)):
        assert decoder.decode(encode(message)) == message


def test_arrays_are_little_endian_and_have_whole_numbers() -> None:
    assert encode_ids([1, -1, 2**31 - 1]) == bytes.fromhex("01000000 ffffffff ffffff7f")
    assert list(decode_ids(encode_ids(range(1000)))) == list(range(1000))
    with pytest.raises(OverflowError):
        encode_ids([2**31])
    with pytest.raises(ProtocolError, match="7 bytes"):
        decode_ids(b"1234567")
    with pytest.raises(ProtocolError, match="7 bytes"):
        BulkArray(dtype="float32", shape=[1], data=b"1234567").floats()


def test_a_malformed_frame_raises_only_protocol_error() -> None:
    decoder = Decoder[WorkerToCore](WorkerToCore)
    rng = random.Random(0)
    valid = encode(SchedulerOutput(step=1, core_epoch=0, generation=0, rows=b"1234", counts=b"1234"))
    for _ in range(3000):
        frame = bytearray(valid if rng.random() < 0.7 else rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(1, 4)):
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        with pytest.raises(ProtocolError):
            decoder.decode(bytes(frame))
    with pytest.raises(ProtocolError):
        decoder.decode(b"\x91" * 100_000)
