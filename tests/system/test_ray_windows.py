"""On a Ray cluster a model with windows answers as transformers do, also if the rank of another node is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.tests.support.ray_network import RayEngine, RayNetwork, obstacle
from tokenloom.tests.system.oracle import GreedyOracle
from tokenloom.tests.system.spread_windows import OPTIONS, check_windows, oracle, windowed

__all__ = ["oracle", "windowed"]  # fixtures

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be a cluster"),
    pytest.mark.timeout(280),
]


@pytest.fixture(scope="module")
def network() -> Iterator[RayNetwork]:
    with RayNetwork(2) as network:
        yield network


@pytest.fixture(scope="module")
def engine(network: RayNetwork, windowed: Path) -> Iterator[RayEngine]:
    with RayEngine(network, "--model", str(windowed), *OPTIONS) as engine:
        engine.wait_ready()
        yield engine
        engine.end()
        network.wait_none(1, "tokenloom", 5.0)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_model_with_windows_answers_as_transformers_do(
    engine: RayEngine, network: RayNetwork, oracle: GreedyOracle, is_killed: bool
) -> None:
    assert engine.find("worker 1") is None, "the second rank runs on the head"
    rank = network.wait_process(1, "tokenloom worker 1")
    check_windows(engine, oracle, int(is_killed), rank.kill if is_killed else None)
    assert rank.is_running() == (not is_killed)
