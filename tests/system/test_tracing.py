"""Spans that an engine with HTTP sends to a collector over OTLP/HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tokenloom.frontend.metrics.tracing import is_traceparent, is_tracestate, new_tracing
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.system.launched import LaunchedEngine

DEADLINE_S = 20.0
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An OTLP/HTTP receiver that keeps all spans."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self._arrival = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._arrival:
            for each in request.resource_spans:
                self.resource |= {pair.key: pair.value.string_value for pair in each.resource.attributes}
                self.spans += [span for scope in each.scope_spans for span in scope.spans]
            self._arrival.notify_all()

    def wait(self, is_there: Callable[[list[Span]], bool]) -> None:
        with self._arrival:
            assert self._arrival.wait_for(lambda: is_there(self.spans), DEADLINE_S), self.spans

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(DEADLINE_S)
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def complete(url: str, traceparent: str = "", tracestate: str = "", **body: object) -> None:
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 5, "ignore_eos": True} | body
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text


def attributes(span: Span) -> dict[str, object]:
    return {
        pair.key: pair.value.string_value
        or pair.value.int_value
        or [each.string_value for each in pair.value.array_value.values]
        for pair in span.attributes
    }


def test_each_request_is_a_span_with_its_phases_under_the_callers_span(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "loom")
    with LaunchedEngine(tmp_path, "--http", "0", "--otlp-endpoint", collector.endpoint) as engine:
        url, begun = engine.wait_http(), time.time_ns()
        complete(url, f"00-{TRACE}-{PARENT}-01", "loom=warp,other@vendor=2", request_id="mine")
        collector.wait(lambda spans: len(spans) == 4)
        by_name = {span.name: span for span in collector.spans}
        request, queue, prefill, decode = (by_name[name] for name in ("llm_request", "queue", "prefill", "decode"))
        assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
        assert {span.trace_state for span in collector.spans} == {"loom=warp,other@vendor=2"}
        assert request.parent_span_id.hex() == PARENT
        assert {span.parent_span_id for span in (queue, prefill, decode)} == {request.span_id}
        assert begun <= request.start_time_unix_nano == queue.start_time_unix_nano
        assert queue.start_time_unix_nano < queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.start_time_unix_nano < prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.start_time_unix_nano < decode.end_time_unix_nano == request.end_time_unix_nano <= time.time_ns()
        assert attributes(request) == {
            "gen_ai.request.model": "tokenloom-demo",
            "gen_ai.response.id": "cmpl-mine",
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": 5,
        }
        assert collector.resource["service.name"] == "loom"
        complete(url, f"00-{TRACE}-{PARENT}-00")  # the caller does not sample this request
        complete(url)
        complete(url, "00-broken", timeout_s=1e-9)
        collector.wait(lambda spans: len(spans) == 4 + 4 + 2)
        assert len({span.trace_id for span in collector.spans}) == 3
        late = next(
            span for span in collector.spans if attributes(span).get("gen_ai.response.finish_reasons") == ["timeout"]
        )
        assert late.status.code == late.status.STATUS_CODE_ERROR and not late.parent_span_id


def test_the_last_spans_are_sent_when_the_engine_stops(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with LaunchedEngine(tmp_path, "--http", "0") as engine:
        complete(engine.wait_http(), n=3)
        assert not collector.spans
        engine.signal(signal.SIGTERM)
        assert engine.wait_exit() == 0
    assert len(collector.spans) == 12


def test_an_unreachable_collector_delays_nothing_and_is_named_in_the_log(tmp_path: Path) -> None:
    with LaunchedEngine(tmp_path, "--http", "0", "--otlp-endpoint", "http://me:hunter2@127.0.0.1:9") as engine:
        complete(engine.wait_http())
        engine.signal(signal.SIGTERM)
        assert engine.wait_exit(10.0) == 0
        lines = engine.errors.read_text(encoding="utf-8").splitlines()
    assert any("spans do not reach 127.0.0.1:9, and requests go on: start it" in line for line in lines)
    assert all(re.match(r"\d\d:\d\d:\d\d [A-Z]+ \w+", line) and "hunter2" not in line for line in lines), lines


def test_opentelemetry_is_imported_only_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, tokenloom.frontend.http.server; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", timeout=DEADLINE_S, check=False).returncode == 0
    assert new_tracing(new_spec()) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry.*pip install 'tokenloom\[otel\]'"):
        new_tracing(new_spec(config=EngineConfig(otlp_endpoint="http://127.0.0.1:9")))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert new_tracing(new_spec()) is None


def test_traceparents_are_validated_by_the_w3c_standard() -> None:
    good = f"00-{TRACE}-{PARENT}-01"
    assert is_traceparent(good) and is_traceparent(f"cc-{TRACE}-{PARENT}-01-what-the-future-brings")
    for bad in ("", "00", good.upper(), f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", good + "\n"):
        assert not is_traceparent(bad), bad
    assert not is_traceparent(f"00-{TRACE}-{'0' * 16}-01")


def test_tracestates_are_validated_by_the_w3c_standard() -> None:
    longest = ",".join(f"a{i}={'x' * 256}" for i in range(32))
    for good in ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "a=1, b=2 ,\t,c=3", "0tenant@sys=a b", "a-_*/0=!", longest):
        assert is_tracestate(good), good
    for bad in ("", ",", "A=1", "a", "a=", "a=b=c", "a= ", "1a=2", "a@1b=2", "a=\x7f", "a=é", f"a={'x' * 257}"):
        assert not is_tracestate(bad), bad
    assert not is_tracestate(longest + ",a=1")
