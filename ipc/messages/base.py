"""What every channel shares: the root of all messages, the handshake, signs of life, bulk arrays.

Structs are msgpack maps with a `type` tag; token, row and block ids are `bytes`: raw little-endian int32 (codec.py).
The other files here hold one channel each.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..errors import ErrorInfo

PROTOCOL_VERSION = 1
EngineAction: TypeAlias = Literal[
    "pause", "resume", "reload", "sleep", "wake_up", "reset_prefix_cache", "start_profile", "stop_profile"
]
MemoryTag: TypeAlias = Literal["weights", "kv_cache"]  # what a worker's memory is for
FinishReason: TypeAlias = Literal["stop", "length", "repetition", "abort", "timeout", "error"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Root of all messages: `type` names the message, fields at their default are left out."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message after each connect. The identity of a client is its socket's: 16 random bytes."""

    protocol_version: int
    run_id: str = ""  # between the engine's own processes
    fingerprint: str = ""  # likewise


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Keeps the lease of a client that has open requests."""


LEASE_S = 3.0  # a client with open requests that is silent for longer is taken for dead
PING_INTERVAL_S = 1.0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answers Hello."""

    protocol_version: int
    run_id: str


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Answers a Hello that cannot be served, and a message that broke the protocol."""

    error: ErrorInfo


class Unknown(Message, frozen=True, kw_only=True, tag="unknown"):
    """The peer does not know the sender: it must say Hello and submit again what it holds."""


class Holding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What workers shall hold in memory: the weights and the KV pool, but for what is asleep."""

    model_folder: str = ""  # weights to read now; empty: those from before
    asleep: list[MemoryTag] = []
    drops_pages: bool = False  # the checkpoint's pages leave the machine's page cache, too


class BulkArray(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers in bulk: little-endian, in C order."""

    dtype: Literal["float32"]
    shape: list[int]
    data: bytes


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    pass
