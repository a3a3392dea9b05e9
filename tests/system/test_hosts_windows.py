"""Over two hosts a model with windows or states answers as transformers do, also if a rank of either is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.tests.support.network_hosts import Network, SpreadEngine, obstacle
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.system.loss_turns import turn_of
from tokenloom.tests.system.oracle import GreedyOracle
from tokenloom.tests.system.spread_windows import OPTIONS, check_windows, new_windowed, oracle

__all__ = ["oracle"]  # a fixture

pytestmark = [
    *turn_of("groups over hosts"),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module", params=some(["windows", "states"], 1))
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped") / "model"
    return new_windowed(folder) if request.param == "windows" else recurrent_checkpoint(folder, "qwen3_next", seed=3)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(tmp_path_factory.mktemp("network"), 2) as network:
        yield network


@pytest.fixture(scope="module")
def engine(network: Network, windowed: Path) -> Iterator[SpreadEngine]:
    with SpreadEngine(network, "--model", str(windowed), *OPTIONS) as engine:
        network.join(1)
        engine.wait_ready()
        yield engine
        engine.end()


@pytest.mark.parametrize("rank", some([0, 1], 1))
def test_a_killed_rank_of_a_model_with_kv_groups_changes_no_answer(
    rank: int, engine: SpreadEngine, network: Network, oracle: GreedyOracle
) -> None:
    assert engine.find("worker 1") is None, "the second rank runs on the head"
    worker = network.wait_agent().wait_rank() if rank else engine.child("worker 0")
    check_windows(engine, oracle, 2 + rank, worker.kill)
    assert not worker.is_running()
