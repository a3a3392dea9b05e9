"""How the engine is started that serves HTTP to a file which asks for nothing special, and what it counts."""

from __future__ import annotations

import time

import httpx2
from prometheus_client.parser import text_string_to_metric_families

KEY = "sk-loom"
ORIGIN = "https://app.example"
OPTIONS = (
    *("--http", "0", "--api-key", KEY, "--cors-origins", ORIGIN, "--max-body-bytes", "100000"),
    "--enable-tokenizer-info-endpoint",
)
DEADLINE_S = 20.0
QUESTION = [{"role": "user", "content": "What is the capital of Peru?"}]


def running(http: httpx2.Client) -> int:
    health = http.get("/health").json()
    return int(health["running"] + health["waiting"])


def wait_idle(http: httpx2.Client, since: float = 0.0) -> None:
    """Until no request is open and no step is in flight, as the engine tells after a step later than `since`
    (monotonic): what it told before need not know of the requests that are meant."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found, now = samples(http), time.monotonic()
        is_news = found["tokenloom_step_age_seconds"] < now - since
        if is_news and not found["tokenloom_socket_queue_depth{workers}"] and not running(http):
            return
        assert now < deadline


def samples(http: httpx2.Client) -> dict[str, float]:
    """Every sample of /metrics, read by Prometheus's own parser; labels but le and the first two in the name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
