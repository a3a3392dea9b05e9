"""Spans that an engine with HTTP sends to a collector over OTLP/HTTP."""

from __future__ import annotations

import errno
import secrets
import socket
import subprocess
import sys
import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tokenloom import SamplingParams
from tokenloom.frontend.server.metrics.tracing import Timeline, is_traceparent, is_tracestate, new_tracing
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.client import Submit
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.equipped_engine import EquippedEngine
from tokenloom.tests.system.http_engine import DEADLINE_S, open_http

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "4bf92f3577b34da6a3ce929d0e0e4737"
PARENT = "00f067aa0ba902b7"


def complete(url: str, traceparent: str = "", tracestate: str = "", **body: object) -> None:
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 5, "ignore_eos": True} | body
    with open_http(url) as http:
        answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def attributes(span: Span) -> dict[str, object]:
    return {
        pair.key: pair.value.string_value
        or pair.value.int_value
        or [each.string_value for each in pair.value.array_value.values]
        for pair in span.attributes
    }


def spans_of(engine: EquippedEngine, trace: str) -> list[Span]:
    return [span for span in list(engine.collector.spans) if span.trace_id.hex() == trace]


def test_each_request_is_a_span_with_its_phases_under_the_callers_span(equipped: EquippedEngine) -> None:
    url, begun = equipped.url, time.time_ns()
    complete(url, f"00-{TRACE}-{PARENT}-01", "loom=warp,other@vendor=2", request_id="mine")
    complete(url, f"00-{OTHER}-{PARENT}-00")  # the caller does not sample this request

    def are_there() -> bool:
        complete(url, request_id="untraced")  # and pushes spans of others, which wait until there are four
        return len(spans_of(equipped, TRACE)) == 4

    wait_until(are_there)
    by_name = {span.name: span for span in spans_of(equipped, TRACE)}
    request, queue, prefill, decode = (by_name[name] for name in ("llm_request", "queue", "prefill", "decode"))
    assert {span.trace_state for span in by_name.values()} == {"loom=warp,other@vendor=2"}
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {request.span_id}
    assert begun <= request.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.start_time_unix_nano < queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.start_time_unix_nano < decode.end_time_unix_nano == request.end_time_unix_nano <= time.time_ns()
    assert attributes(request) == {
        "gen_ai.request.model": "first",
        "gen_ai.response.id": "cmpl-mine",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
    }
    assert equipped.collector.resource["service.name"] == "loom"
    assert not spans_of(equipped, OTHER)
    roots = [span for span in equipped.collector.spans if attributes(span).get("gen_ai.response.id") == "cmpl-untraced"]
    assert len({span.trace_id for span in roots}) == len(roots) and not any(span.parent_span_id for span in roots)


def test_a_stop_sends_the_last_spans_and_closes_the_doors(equipped: EquippedEngine) -> None:
    port, trace = int(equipped.url.rpartition(":")[2]), secrets.token_hex(16)
    complete(equipped.url, f"00-{trace}-{PARENT}-01", timeout_s=1e-9)
    equipped.processes()
    assert equipped.stop() == 0
    (late,) = [span for span in spans_of(equipped, trace) if span.name == "llm_request"]
    assert attributes(late)["gen_ai.response.finish_reasons"] == ["timeout"]
    assert late.status.code == late.status.STATUS_CODE_ERROR
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
    assert not equipped.socket.exists()


def test_an_unreachable_collector_is_named_in_the_log_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    tracing = new_tracing(new_spec(config=EngineConfig(otlp_endpoint="http://me:hunter2@127.0.0.1:9")))
    assert tracing is not None
    answer = Timeline(Submit(request_id="a", params=SamplingParams()), 1, time.monotonic())
    tracing.record(answer, "stop", time.monotonic())
    tracing.close()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("tokenloom")]
    assert any("spans do not reach 127.0.0.1:9, and requests go on: start it" in line for line in lines)
    assert not any("hunter2" in line for line in lines)


def test_opentelemetry_is_imported_only_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, tokenloom.frontend.server.http.server; sys.exit('opentelemetry' in sys.modules)"
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
