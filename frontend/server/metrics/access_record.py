"""AccessRecord: the facts about one HTTP request for the access log, collected while the request is answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

CLIENT_CLOSED_REQUEST = 499  # nginx's number, for log and metrics; never sent


@dataclass(slots=True)
class AccessRecord:
    """Caller, times, status and sizes of one HTTP request and its response."""

    peer: str = ""  # client's host and a digest of its key; equal peers share grammar compilers
    begun_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0  # time at which the head of the answer was sent
    status: int = CLIENT_CLOSED_REQUEST  # the value until an answer starts
    is_whole: bool = False  # whether the answer was written to its end
    num_bytes: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    adapter: str = ""  # the adapter's name; empty: the model itself
    headers: Sequence[tuple[bytes, bytes]] = ()  # headers of the answer


access_record: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)  # of the current request
