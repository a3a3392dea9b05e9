"""The W3C trace context that the HTTP request being served came with: https://www.w3.org/TR/trace-context/

A context variable, so that it reaches the submits of a request through whatever makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_KEY = r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=(?=[^,=]{1,256}$)[\x20-\x7e]*[\x21-\x7e]")  # a vendor's part of a tracestate
MAX_MEMBERS = 32


class TraceContext(NamedTuple):
    """The values of the two headers; what did not come is empty."""

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()
incoming_trace: ContextVar[TraceContext] = ContextVar("incoming_trace", default=NO_TRACE)


def read_trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
    """Of a request's headers. What is malformed did not come; without a traceparent a tracestate means nothing."""
    values: dict[bytes, list[str]] = {b"traceparent": [], b"tracestate": []}
    for name, value in headers:
        if name in values:
            values[name].append(value.decode("latin-1"))
    traceparent, tracestate = (",".join(each) for each in values.values())
    if not is_traceparent(traceparent):
        return NO_TRACE
    return TraceContext(traceparent, tracestate if is_tracestate(tracestate) else "")


def is_traceparent(text: str) -> bool:
    return len(text) < 256 and _TRACEPARENT.fullmatch(text) is not None


def is_tracestate(text: str) -> bool:
    members = [member for each in text.split(",") if (member := each.strip(" \t"))]
    return 0 < len(members) <= MAX_MEMBERS and all(_MEMBER.fullmatch(member) for member in members)
