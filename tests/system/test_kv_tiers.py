"""Operators see, fill and clear the KV tiers of a real engine over HTTP and with the client library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from tokenloom import Client, SamplingParams
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import LaunchedEngine, serve

DEADLINE_S = 30.0
PROMPT = "The capital of France is Paris, and the capital of Spain is Madrid. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedEngine]:
    options = ["--kv-events", f"ipc://{folder}/e", "--kv-disk", str(folder / "disk"), "--kv-host-bytes", "16M"]
    options += ["--http", "127.0.0.1:0", "--num-kv-blocks", "400"]
    yield from serve(LaunchedEngine(tmp_path_factory.mktemp("run"), *options))  # type: ignore[misc]


def tokens_by_source(http: httpx2.Client) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    samples = families["tokenloom_prompt_tokens_by_source"].samples
    found = {sample.labels["source"]: sample.value for sample in samples if sample.name.endswith("_total")}
    assert sum(found.values()) == families["tokenloom_prompt_tokens"].samples[0].value
    return found


def wait_until_open(http: httpx2.Client) -> None:
    """Wait until the names of the weights are known, and so those of blocks."""
    wait_until(lambda: sources(http)["disk"]["open"], "the disk is open", DEADLINE_S)


def test_a_subscriber_learns_the_blocks_of_a_prompt(engine: LaunchedEngine, folder: Path) -> None:
    with httpx2.Client(base_url=engine.url, timeout=DEADLINE_S) as http:
        wait_until_open(http)  # blocks are renamed then, and those of a prompt that runs meanwhile are not told
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay, Client(engine.address) as client:
        output = client.generate("One two three four five six seven eight. " * 8, SamplingParams(max_tokens=2))[0]
        replay.connect(f"ipc://{folder}/e-replay")
        replay.send_multipart([b"", bytes(8)])  # all batches from the first on
        events: list[dict[str, Any]] = []
        while replay.poll(int(DEADLINE_S * 1000)) and (parts := replay.recv_multipart())[1] != b"\xff" * 8:
            events += msgspec.msgpack.decode(parts[2])[1]
    assert events[0] == {"type": "AllBlocksCleared"}
    stored = [event for event in events if event["type"] == "BlockStored" and event["medium"] == "GPU"]
    known = [token for event in stored for token in event["token_ids"]]
    num_whole = len(output.prompt_token_ids) // 16 * 16
    assert num_whole and known[:num_whole] == output.prompt_token_ids[:num_whole]


def test_blocks_go_to_a_disk_come_back_and_are_cleared(engine: LaunchedEngine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    with httpx2.Client(base_url=engine.url, timeout=DEADLINE_S) as http, Client(engine.address) as client:
        num_tokens = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
        disk = wait_until(lambda: written(http), "the blocks are on the disk", DEADLINE_S)
        assert disk["open"] and not disk["breaker_open"] and disk["error"] == ""
        client.reset_prefix_cache()
        found = http.post("/kv/prefetch", json={"prompt": PROMPT}).json()["num_tokens"]
        assert num_tokens - 16 < found <= num_tokens
        assert client.prefetch_kv(PROMPT) == found
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > num_tokens - 32
        by_source = tokens_by_source(http)
        assert by_source["disk"] + by_source.get("host", 0) == usage["prompt_tokens_details"]["cached_tokens"]
        assert http.post("/kv/clear").json() == {"success": True}
        assert client.prefetch_kv(PROMPT) == 0
        assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def written(http: httpx2.Client) -> dict[str, object] | None:
    """Return the disk of `GET /kv` once it has written all. It is not there before the tier process has reported it."""
    disk = sources(http).get("disk", {})
    return disk if disk.get("held_bytes") and not disk["queued_bytes"] else None


def sources(http: httpx2.Client) -> dict[str, dict[str, object]]:
    """Return the tiers of `GET /kv` by name."""
    tiers = http.get("/kv").json()["tiers"]
    return {source["name"]: source for source in tiers["sources"]} if tiers else {"disk": {"held_bytes": 0}}
