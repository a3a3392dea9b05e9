"""Encoding on the wire: msgpack (msgspec) for messages, raw little-endian int32 for token, row and block ids.

Knows no message. A malformed frame raises only ProtocolError, so that a process can count it and continue.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Generic, TypeAlias, TypeVar

import msgspec

from .errors import ProtocolError

T = TypeVar("T")
JsonObject: TypeAlias = dict[str, object]
# Regular expression of a string in a JSON text. An unterminated string matches to the end of the text: if a search
# continued after its first quote instead, it would read the rest again from each escaped quote, in quadratic time.
JSON_STRING = r'"[^"\\]*(?:(?s:\\.)[^"\\]*)*"?'

assert sys.byteorder == "little", "id frames are little-endian and are read in place"
assert array("i").itemsize == 4, "id frames need a C int of 32 bits"

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Decoder(Generic[T]):
    """Decoder of one channel's frames, which hold messages of the tagged union `message_type`."""

    def __init__(self, message_type: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def decode(self, frame: bytes | bytearray | memoryview) -> T:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from None


def encode_ids(ids: Iterable[int]) -> bytes:
    """Return ids as little-endian int32; OverflowError if one does not fit."""
    return array("i", ids).tobytes()


def decode_ids(frame: bytes) -> array[int]:
    """Return the ids in the output of `encode_ids` as an array('i'); ProtocolError if its length is not a multiple of
    4."""
    try:
        return array("i", frame)
    except ValueError:
        raise ProtocolError(f"an id frame has {len(frame)} bytes, which is not a multiple of 4") from None


def num_ids(frame: bytes) -> int:
    """Return the number of ids in a frame."""
    return len(frame) // 4
