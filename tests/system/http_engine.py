"""The options of the HTTP engine that most test files share, and readers of its load and metrics."""

from __future__ import annotations

import time

import httpx2
from prometheus_client.parser import text_string_to_metric_families

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


def running(http: httpx2.Client) -> int:
    health = http.get("/health").json()
    return int(health["running"] + health["waiting"])


def wait_idle(http: httpx2.Client, since: float = 0.0) -> None:
    """Wait until no request is open and no step is in flight, as of a step after `since` (monotonic seconds): older
    metrics may miss the latest requests."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found, now = samples(http), time.monotonic()
        is_news = found["tokenloom_step_age_seconds"] < now - since
        if is_news and not found["tokenloom_socket_queue_depth{workers}"] and not running(http):
            return
        assert now < deadline


def samples(http: httpx2.Client) -> dict[str, float]:
    """Return every sample of /metrics by name and labels (less the common two), from Prometheus's own parser."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
