"""Over two hosts blocks of several KV groups come back from slots and disks of both, and answers are those of
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.tests.support.network_hosts import Network, SpreadEngine, obstacle
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.oracle import GreedyOracle
from tokenloom.tests.system.spread_windows import OPTIONS, oracle, windowed
from tokenloom.tests.system.tier_engine import (
    BLOCK_SIZE,
    DEADLINE_S,
    GREEDY,
    ask,
    load,
    new_prompts,
    num_loaded,
    num_readable,
    wait_written,
)

__all__ = ["oracle", "windowed"]  # fixtures

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(240),
]

PROMPTS = [[token % 256 for token in prompt] for prompt in new_prompts(6, 300, seed=31)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), 2) as network:
        network.private.append(network.folder / "kv")
        yield network


@pytest.fixture(scope="module")
def engine(network: Network, windowed: Path) -> Iterator[SpreadEngine]:
    options = ["--num-kv-blocks", "40", "--step-timeout-s", "60"]
    options += ["--kv-host-bytes", "16M", "--kv-disk", str(network.folder / "kv")]
    with SpreadEngine(network, "--model", str(windowed), *OPTIONS, *options) as engine:
        network.join(1)
        engine.wait_ready()
        engine.wait_log("KV tiers opened", 2)
        yield engine
        engine.end()


def check(outputs: list[RequestOutput], oracle: GreedyOracle) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        oracle.check(prompt, output.outputs[0].token_ids)


def test_evicted_blocks_of_all_groups_come_back_from_both_hosts(engine: SpreadEngine, oracle: GreedyOracle) -> None:
    assert any("KV tiers:" in line and " slabs of " in line for line in engine.lines), engine.lines
    with Client(engine.address) as client:
        check(ask(client, PROMPTS, GREEDY), oracle)
        outputs = ask(client, PROMPTS, GREEDY)
    check(outputs, oracle)
    assert num_loaded(outputs, "host") >= num_readable(PROMPTS[0]) * 3


def test_after_the_loss_of_a_host_blocks_of_all_groups_come_from_both_disks(
    engine: SpreadEngine, network: Network, oracle: GreedyOracle
) -> None:
    agent = network.wait_agent()
    num_blocks = sum(map(num_readable, PROMPTS)) // BLOCK_SIZE  # of the first group alone
    wait_written([network.folder / "kv", network.folder / f"kv-{agent.number}"], num_blocks + len(PROMPTS))
    num_opened = engine.log().count("KV tiers opened")
    agent.end()
    engine.wait_log(f"host {agent.address} is lost")
    again = network.join(agent.number)
    engine.wait_log("KV tiers opened", num_opened + 2)
    again.wait_rank()
    with Client(engine.address, reconnect_timeout_s=DEADLINE_S) as client:
        wait_until(lambda: client.health().is_ready, timeout_s=DEADLINE_S)
        outputs = load(client, PROMPTS)
    check(outputs, oracle)
    assert num_loaded(outputs, "disk") == sum(map(num_readable, PROMPTS))
