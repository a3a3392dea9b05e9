"""The checks of every request: key, size, origin and ids; and the statuses of missing paths."""

from __future__ import annotations

import re

import httpx2

from tokenloom.tests.system.http_engine import KEY, ORIGIN, samples


def test_a_missing_or_wrong_key_gets_401_and_probes_need_no_key(stranger: httpx2.Client) -> None:
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": KEY}):
        answer = stranger.get("/v1/models", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert stranger.get(path).status_code == 200
    assert "<html" in stranger.get("/", follow_redirects=True).text


def test_requests_refused_before_the_engine_are_counted_by_cause(http: httpx2.Client) -> None:
    def count(kind: str) -> float:
        return samples(http).get(f"tokenloom_requests_refused_total{{{kind}}}", 0)

    for kind, path, body, key in (
        ("body", "completions", b"{", KEY),
        ("body", "../api/chat", b"{", KEY),
        ("request", "../api/chat", b'{"messages": [{"role": "user"}], "options": {"temperature": -1}}', KEY),
        ("model", "../api/embed", b'{"model": "other", "input": "x"}', KEY),
        ("body", "chat/completions", b'{"messages": 7, "tempurature": 1}', KEY),
        ("request", "completions", b'{"prompt": "x", "temperature": -1}', KEY),
        ("request", "embeddings", b'{"input": []}', KEY),
        ("model", "responses", b'{"model": "other", "input": "x"}', KEY),
        ("key", "completions", b"{}", "wrong"),
    ):
        before, headers = count(kind), {"authorization": f"Bearer {key}"}
        answer = http.post(f"/v1/{path}", content=body, headers=headers)
        assert answer.status_code >= 400 and count(kind) == before + 1, (kind, answer.text)


def test_request_ids_and_trace_headers_are_returned(http: httpx2.Client) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = [("x-request-id", "abc-1"), ("traceparent", trace), ("tracestate", "a=1"), ("tracestate", "b=2")]
    answer = http.get("/v1/models", headers=sent)
    assert answer.headers["tracestate"] == "a=1,b=2"
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("abc-1", trace)
    assert re.fullmatch("[0-9a-f]{32}", http.get("/v1/models").headers["x-request-id"])
    assert "traceparent" not in http.get("/v1/models", headers={"traceparent": "rubbish"}).headers


def test_cors_allows_only_the_configured_origin_also_to_read_errors(
    http: httpx2.Client, stranger: httpx2.Client
) -> None:
    allowed = "access-control-allow-origin"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    admitted = stranger.options("/v1/completions", headers=preflight | {"origin": ORIGIN})
    assert (admitted.status_code, admitted.headers[allowed]) == (200, ORIGIN)
    assert int(admitted.headers["content-length"]) == len(admitted.content), "a client waits for the end otherwise"
    refused = stranger.get("/v1/models", headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers[allowed]) == (401, ORIGIN)
    assert allowed not in http.get("/v1/models", headers={"origin": "https://evil.example"}).headers
