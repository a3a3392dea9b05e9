"""KV tiers of several replicas: each has its own slots and folder, requests go back to the replica that keeps their
blocks, and tokens are those of computed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.tier_engine import (
    BLOCK_SIZE,
    DEADLINE_S,
    GREEDY,
    TierEngine,
    ask,
    check_equal,
    new_prompts,
    num_readable,
    objects,
)

LENGTH = 400
PROMPTS = new_prompts(16, LENGTH, seed=31)
OPTIONS = ["--dp", "2", "--num-kv-blocks", "101", "--max-model-len", "900", "--deterministic", "--speculation", "off"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierEngine]:
    """An engine of two replicas, each with a pool of two prompts at most and slots for all, and events."""
    root = tmp_path_factory.mktemp("replicas")
    with TierEngine(root, None, *OPTIONS, "--kv-host-bytes", "64M", "--kv-events", f"ipc://{root}/events") as engine:
        engine.wait_ready()
        yield engine
        engine.end()


@pytest.fixture(scope="module")
def client(engine: TierEngine) -> Iterator[Client]:
    with Client(engine.address) as client:
        yield client


@pytest.fixture(scope="module")
def computed(client: Client) -> list[RequestOutput]:
    """The answers of empty caches."""
    outputs = client.generate(PROMPTS, GREEDY, use_tqdm=False)  # all at once, so that each replica gets some
    assert not any(output.num_cached_tokens for output in outputs)
    return outputs


def test_blocks_come_back_from_the_slots_of_the_replica_that_computed_them(
    client: Client, computed: list[RequestOutput]
) -> None:
    outputs = ask(client, PROMPTS)
    assert [output.num_cached_tokens for output in outputs] == [num_readable(PROMPTS[0])] * len(PROMPTS)
    num_loaded = [sum(output.metrics.num_loaded_tokens.values()) for output in outputs]
    assert sum(num_loaded) > 4 * LENGTH, "the pools hold eight prompts, the slots had the others"
    check_equal(computed, outputs)


def test_a_prefetch_goes_to_the_replica_that_keeps_the_blocks(client: Client, computed: list[RequestOutput]) -> None:
    client.reset_prefix_cache()  # blocks that were only in a pool are nowhere now
    found = [client.prefetch_kv(prompt) for prompt in PROMPTS]
    outputs = ask(client, PROMPTS)
    assert found.count(LENGTH) >= 4
    for num_tokens, output in zip(found, outputs, strict=True):
        assert output.num_cached_tokens >= min(num_tokens, num_readable(PROMPTS[0]))
    check_equal(computed, outputs)


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_each_replica_has_its_own_disk_and_a_lost_process_changes_no_answer(
    tmp_path: Path, computed: list[RequestOutput]
) -> None:
    kv = tmp_path / "kv"
    with TierEngine(tmp_path, kv, *OPTIONS, "--kv-host-bytes", "64M") as engine:
        engine.wait_open(2)
        with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
            for name in ("core of replica 1", "worker 0", "tier of replica 1", "tier"):
                engine.child(name).kill()
                check_equal(computed, ask(client, PROMPTS))
                engine.wait_log(f"supervisor: {name} is back")
            folders = [kv, kv / "replica-1"]
            num_blocks = len(PROMPTS) * (LENGTH // BLOCK_SIZE)
            wait_until(lambda: sum(len(objects(folder)) for folder in folders) >= num_blocks, timeout_s=DEADLINE_S)
            assert all(map(objects, folders)), "each replica writes"
        engine.end()
