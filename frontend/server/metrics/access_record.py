"""AccessRecord: the facts about one HTTP request for the access log, collected while it is answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

CLIENT_CLOSED_REQUEST = 499  # nginx's number, for log and metrics; never sent


@dataclass(slots=True)
class AccessRecord:
    """Caller, times, status and sizes of one HTTP response."""

    peer: str = ""  # host of the connection, and a digest of the key; requests of equal ones share the compilers
    begun_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0  # when the head of the answer went out
    status: int = CLIENT_CLOSED_REQUEST  # until the answer has one
    is_whole: bool = False  # the answer was written to its end
    num_bytes: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    adapter: str = ""  # its name; empty: the model itself
    headers: Sequence[tuple[bytes, bytes]] = ()  # of the answer


access_record: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)  # of the current request
