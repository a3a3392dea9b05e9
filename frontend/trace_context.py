"""The W3C trace context that the HTTP request being served came with; "" for none.

A context variable, so that it reaches the submits of a request through whatever makes them.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

incoming_traceparent: ContextVar[str] = ContextVar("incoming_traceparent", default="")

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")


def is_traceparent(text: str) -> bool:
    """Whether a header is of the form that https://www.w3.org/TR/trace-context/ gives."""
    return len(text) < 256 and _TRACEPARENT.fullmatch(text) is not None
