"""The options of the HTTP engine that most test files share, and readers of its load and metrics."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

from tokenloom.tests.support.waiting import wait_until

KEY = "sk-loom"
ORIGIN = "https://app.example"
NUM_STORED = 50  # responses
MAX_WAITING_TOKENS = 200_000  # of which one request may have a quarter
OPTIONS = (
    *("--http", "0", "--api-key", KEY, "--cors-origins", ORIGIN, "--enable-tokenizer-info-endpoint"),
    *("--response-store-count", str(NUM_STORED), "--max-waiting-tokens", str(MAX_WAITING_TOKENS)),
    *("--speculation", "off"),  # the guessed tokens in usage depend on times
)
DEADLINE_S = 20.0
QUESTION = [{"role": "user", "content": "What is the capital of Peru?"}]


def open_http(url: str, key: str = "") -> httpx2.Client:
    """Return a client of the engine that reads no certificates, which would take 30 ms of CPU each time."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=url, headers=headers, timeout=DEADLINE_S, verify=False)


def open_openai(url: str, key: str = "-") -> openai.OpenAI:
    """Return OpenAI's client of the engine, which reads no certificates either."""
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S, http_client=http)


def ask(http: httpx2.Client, path: str, body: Mapping[str, object] | None = None, **fields: object) -> Any:
    """Return the answer to a body and further fields, which must be served."""
    answer = http.post(path, json={**(body or {}), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx2.Client, path: str, body: Mapping[str, object], status: int = 400) -> Any:
    """Return the error of a body that must be refused."""
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@contextmanager
def sent(url: str, path: str, body: bytes) -> Iterator[socket.socket]:
    """Send a request and read nothing of its answer; leaving closes the connection."""
    place = urlsplit(url)
    fields = ("host: x", f"authorization: Bearer {KEY}", f"content-length: {len(body)}")
    with socket.create_connection((place.hostname, place.port or 80), timeout=DEADLINE_S) as connection:
        connection.sendall("\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body)
        yield connection


def running(http: httpx2.Client) -> int:
    health = http.get("/health").json()
    return int(health["running"] + health["waiting"])


def wait_idle(http: httpx2.Client, since: float = 0.0) -> None:
    """Wait until no request is open and no step is in flight, as of a step after `since` (monotonic seconds): older
    metrics may miss the latest requests."""

    def is_idle() -> bool:
        found, now = samples(http), time.monotonic()
        is_news = found["tokenloom_step_age_seconds"] < now - since
        return is_news and not found["tokenloom_socket_queue_depth{workers}"] and not running(http)

    wait_until(is_idle)


def samples(http: httpx2.Client) -> dict[str, float]:
    """Return every sample of /metrics by name and labels (less the common two), from Prometheus's own parser."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
