"""AccessRecord: what the access log tells of an HTTP request, filled in by all that answer it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; nginx's number, for the log and the metrics


@dataclass(slots=True)
class AccessRecord:
    """What is known of a request that is being answered."""

    begun_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0  # when the head of the answer went out
    status: int = CLIENT_CLOSED_REQUEST  # until there is another
    is_whole: bool = False  # the answer was written to its end
    num_bytes: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    headers: Sequence[tuple[bytes, bytes]] = ()  # of the answer


access_record: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)  # of the current request
