"""Messages of several channels: the base class, handshake, ping and bulk arrays.

Structs are msgpack maps with a `type` tag; token, row and block ids are `bytes`: raw little-endian int32 (codec.py).
Most other files here define one channel each; adapter.py, media.py and metrics.py define parts of
messages, orders.py the orders of two channels.
"""

from __future__ import annotations

from array import array
from typing import Literal, TypeAlias

import msgspec

from ..errors import ErrorInfo, ProtocolError

PROTOCOL_VERSION = 1
OrderAction: TypeAlias = Literal[
    "pause",
    "resume",
    "reload",
    "sleep",
    "wake_up",
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
    "clear_kv_cache",
    "log_level",
    "restart_replicas",
    "reload_frontends",
]
DifferenceKind: TypeAlias = Literal[  # how a prompt differs from the nearest earlier one of its conversation
    "time",  # in a time, a date, a number or an id
    "system",  # in the system prompt
    "tools",  # in the tools
    "tools_order",  # it has the same tools in another order
    "thoughts",  # reasoning of an earlier answer was dropped
    "answer",  # an earlier answer stands there with other tokens than it was generated with
    "message",  # in an earlier message
    "template",  # the chat template or its variables wrote something else
    "text",  # in a prompt without messages
]
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]  # running requests stop and stay, finish first, or end
MemoryTag: TypeAlias = Literal["weights", "kv_cache"]  # parts of a worker's memory
FinishReason: TypeAlias = Literal["stop", "length", "repetition", "abort", "timeout", "error"]
MissReason: TypeAlias = Literal[  # why a block that a request has computed before is not in the prefix cache
    "evicted",  # the same tenant's requests needed its memory
    "evicted_by_others",  # another tenant's did
    "cleared",  # the prefix cache was reset
    "lost",  # the workers have ended, or their memory was freed
    "weights",  # it was computed with other weights
    "adapter",  # with another adapter
    "salt",  # with another cache_salt
    "concurrent",  # another request computes it at the same time
    "window",  # the layers that see all tokens have it, those with a window do not
    "state",  # the state behind it was not kept
    "tier",  # a KV tier has it, and it was not loaded: it would have taken longer than computing
    "unread",  # the request may not read it
]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base class of messages: `type` names the message; fields with their default value are omitted."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message after each connect. A client is identified by its socket's identity: 16 random bytes."""

    protocol_version: int
    run_id: str = ""  # only between the engine's own processes
    fingerprint: str = ""  # only between the engine's own processes


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Sign of life; with it a client that has open requests renews its lease. The reply is Pong."""


LEASE_S = 3.0  # a client with open requests counts as dead after this time without a message
PING_INTERVAL_S = 1.0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Reply to a Hello that is accepted."""

    protocol_version: int
    run_id: str
    model_digest: str = ""  # to clients: equal for engines and gateways that give the same answers; empty: unknown


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Reply to a Hello that is not accepted, or to a message that violates the protocol."""

    error: ErrorInfo


class Unknown(Message, frozen=True, kw_only=True, tag="unknown"):
    """Reply to an unknown sender, which must send Hello and resubmit its open requests."""


class Holding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The memory that workers are to hold: weights and KV pool, except the parts in `asleep`, which are freed."""

    model_folder: str = ""  # weights to load; empty: keep the current ones
    asleep: list[MemoryTag] = []
    drops_pages: bool = False  # also drop the checkpoint from the machine's page cache


class Rank(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Place of a worker in its group: the pipeline stage, and the place in the stage's tensor-parallel group."""

    pp: int
    tp: int

    def __str__(self) -> str:
        """Return the rank's name in logs and errors: "1", or "2.1" in a later stage than the first."""
        return f"{self.pp}.{self.tp}" if self.pp else str(self.tp)

    @classmethod
    def parse(cls, name: str) -> Rank:
        pp, _, tp = name.rpartition(".")
        return cls(int(pp or 0), int(tp))


class BulkArray(msgspec.Struct, frozen=True, kw_only=True):
    """An array as raw little-endian numbers in C order."""

    dtype: Literal["float32"]
    shape: list[int]
    data: bytes

    def floats(self) -> array[float]:
        """Return the numbers of a vector; ProtocolError if its shape does not match its bytes."""
        if self.shape != [len(self.data) / 4]:
            raise ProtocolError(f"a vector of shape {self.shape} has {len(self.data)} bytes")
        return array("f", self.data)

    def numbers(self) -> list[float] | list[list[float]]:
        """Return the numbers of a vector, or those of a matrix by rows; ProtocolError as above."""
        if len(self.shape) != 2:
            return self.floats().tolist()
        num_rows, width = self.shape
        if 4 * num_rows * width != len(self.data):
            raise ProtocolError(f"a matrix of shape {self.shape} has {len(self.data)} bytes")
        flat = array("f", self.data).tolist()
        return [flat[start : start + width] for start in range(0, num_rows * width, width)] if width else []


class CacheMisses(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a prompt that requests have computed before and that were not found in the prefix cache, by reason. All
    other tokens that were not found are new, or their blocks were lost before the memory of losses begins."""

    num_tokens: dict[MissReason, int] = {}
    evicted_s: float = 0.0  # seconds since the eviction of the first evicted block
    memory_s: float = 0.0  # seconds that the memory of losses reaches back; 0: to the start of the core


class PromptDifference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first difference of a prompt from the nearest earlier one of its conversation, if both have equal tokens
    behind it."""

    kind: DifferenceKind
    field: str  # of the request: messages[0].content, tools …
    token: int  # index of the first token that differs
    num_tokens: int  # behind it that were computed before


class CacheReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why tokens of a prompt were computed although they had been computed before."""

    misses: CacheMisses | None = None
    difference: PromptDifference | None = None


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    pass
