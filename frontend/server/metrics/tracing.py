"""Tracing: exports OpenTelemetry spans of requests, if --otlp-endpoint or OpenTelemetry's variables name an exporter.

    llm_request ─┬─ queue      from arrival to the first step
                 ├─ prefill    to the first token
                 └─ decode     to the end

The parent is the caller's span, if the request has a W3C trace context (https://www.w3.org/TR/trace-context/). Spans
are created when a request ends, from its times, so that tokens cost nothing. A thread of OpenTelemetry sends them and
queues at most 2048 (OTEL_BSP_MAX_QUEUE_SIZE). OpenTelemetry (the extra `otel`) is imported only if configured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from ....ipc.codec import JsonObject
from ....ipc.errors import ConfigError, Overloaded
from ....ipc.messages.client import Submit
from ....ipc.process.log import is_worth_a_line
from ....ipc.shortages.threads import start_thread
from ....ipc.spec.config.engine_spec import EngineSpec

logger = logging.getLogger("tokenloom.frontend")

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_S = 2.0  # time for sending the last spans when the engine stops
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_KEY = r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=(?=[^,=]{1,256}$)[\x20-\x7e]*[\x21-\x7e]")  # one vendor's entry of a tracestate
MAX_MEMBERS = 32


@dataclass(slots=True)
class Timeline:
    """Token counts of an answer, and the times of its events in monotonic seconds; 0: has not happened yet."""

    submit: Submit
    num_prompt_tokens: int
    arrived_at: float
    started_at: float = 0.0  # the answer's first step
    first_at: float = 0.0  # the answer's first token
    last_at: float = 0.0  # the answer's newest tokens
    num_tokens: int = 0
    num_resumed: int = 0  # tokens of earlier attempts, which the client already has
    shown_key: str = ""  # a random key, set when the dashboard first shows the answer

    def shown(self, now: float) -> JsonObject:
        """Return the answer for the dashboard. Request ids are secrets of their callers, so it has a random key
        instead, with which it can be aborted."""
        self.shown_key = self.shown_key or secrets.token_hex(16)
        return {
            "key": self.shown_key,
            "adapter": self.submit.adapter,
            "state": "running" if self.started_at else "waiting",
            "age_s": now - self.arrived_at,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens and self.num_tokens / (now - self.started_at),
        }


class _Complaints(logging.Handler):
    """Log handler that repeats OpenTelemetry's warnings as ours, with the remedy: the 1st, 2nd, 4th, … only, since
    OpenTelemetry logs one for each batch of spans."""

    def __init__(self, place: str) -> None:
        super().__init__(logging.WARNING)
        self._place, self._count = place, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        if is_worth_a_line(self._count):
            text = "spans do not reach %s, and requests go on: start it, or give another --otlp-endpoint (%d: %.200s)"
            logger.warning(text, self._place, self._count, record.getMessage())


class Tracing:
    """Owner of the exporter and its thread. It sets no global of OpenTelemetry, since the embedding program may use
    them."""

    def __init__(self, endpoint: str | None, model: str, run_id: str) -> None:
        """`endpoint`: URL of a collector of OTLP over HTTP; None: read OpenTelemetry's variables. ImportError if
        OpenTelemetry is not installed."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "tokenloom")
        resource = Resource.create({"service.name": name, "service.instance.id": run_id})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        place = "the collector" if endpoint is None else urlsplit(endpoint).netloc.rpartition("@")[2]
        logging.getLogger("opentelemetry").addHandler(_Complaints(place))
        self._tracer = self._provider.get_tracer("tokenloom")
        self._model = model

    def record(self, answer: Timeline, reason: str, ended_at: float) -> None:
        """Create and queue the spans of an answer that has just ended. `reason`: its finish reason; `ended_at`:
        monotonic seconds."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        submit = answer.submit
        caller = {"traceparent": submit.traceparent, "tracestate": submit.tracestate}
        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(caller),
            trace.SpanKind.SERVER,
            {
                "gen_ai.request.model": submit.adapter or self._model,
                "gen_ai.response.id": submit.request_id,
                "gen_ai.response.finish_reasons": [reason],
                "gen_ai.usage.input_tokens": answer.num_prompt_tokens,
                "gen_ai.usage.output_tokens": answer.num_tokens,
            },
            start_time=_nanoseconds(answer.arrived_at + offset),
        )
        if reason in ("error", "timeout"):
            span.set_status(trace.StatusCode.ERROR, reason)
        inside = trace.set_span_in_context(span)
        for name, begin, end in _phases(answer, ended_at):
            phase = self._tracer.start_span(name, inside, start_time=_nanoseconds(begin + offset))
            phase.end(_nanoseconds(end + offset))
        span.end(_nanoseconds(ended_at + offset))

    def close(self) -> None:
        """Send the queued spans and end the exporter's thread; wait at most FLUSH_S for it."""
        with contextlib.suppress(Overloaded):
            start_thread("tokenloom spans", self._provider.shutdown).join(FLUSH_S)


def new_tracing(spec: EngineSpec) -> Tracing | None:
    """Return the tracing, or None if no exporter is configured or OpenTelemetry is not installed.

    If OpenTelemetry is not installed, --otlp-endpoint raises ConfigError; variables alone only log a warning."""
    endpoint = spec.config.otlp_endpoint
    if endpoint is None and not any(os.environ.get(name) for name in _VARIABLES):
        return None
    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    try:
        return Tracing(endpoint, spec.served_model_name, spec.run_id)
    except ImportError as error:
        mend = f"{error}: install it with pip install 'tokenloom[otel]'"
        if endpoint is not None:
            raise ConfigError(f"--otlp-endpoint needs OpenTelemetry; {mend}") from None
        logger.warning("spans are not exported; %s", mend)
        return None


def _phases(answer: Timeline, ended_at: float) -> list[tuple[str, float, float]]:
    """Return name, start and end of each phase that the answer reached."""
    begins = (("queue", answer.arrived_at), ("prefill", answer.started_at), ("decode", answer.first_at))
    came = [(name, begin) for name, begin in begins if begin]
    ends = [*(begin for _, begin in came[1:]), ended_at]
    return [(name, begin, end) for (name, begin), end in zip(came, ends, strict=True)]


def _nanoseconds(unix_time: float) -> int:
    return int(unix_time * 1e9)


class TraceContext(NamedTuple):
    """Values of the traceparent and tracestate headers of an HTTP request; each is empty if missing."""

    traceparent: str = ""
    tracestate: str = ""


NO_TRACE = TraceContext()
# A context variable reaches every Submit of an HTTP request without being a parameter on the way.
incoming_trace: ContextVar[TraceContext] = ContextVar("incoming_trace", default=NO_TRACE)


def read_trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
    """Return the trace context in a request's headers. A malformed header counts as missing, and so does a tracestate
    without a traceparent."""
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
