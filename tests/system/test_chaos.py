"""The short form of scripts/chaos.py: processes are killed, stopped and made to fail while clients stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.scripts import chaos
from tokenloom.tests.support import ray_network
from tokenloom.tests.support.network_hosts import obstacle


@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_no_fault_loses_or_changes_an_answer(num_ranks: int) -> None:
    options = ["--faults", "5", "--clients", "3", "--seed", "1"]
    assert chaos.main([*options, "--tensor-parallel-size", str(num_ranks)]) == 0


@pytest.mark.timeout(240)
def test_no_fault_loses_or_changes_an_answer_of_adapters_that_take_turns() -> None:
    assert chaos.main(["--faults", "4", "--clients", "4", "--seed", "2", "--adapters", "16"]) == 0


@pytest.mark.nightly
@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_faults", "has_tiers"), [(8, False), (100, False), (100, True)])
def test_no_fault_of_hosts_and_links_loses_an_answer(num_faults: int, has_tiers: bool, tmp_path: Path) -> None:
    options = ["--faults", str(num_faults), "--clients", "5", "--hosts", "2", "--tensor-parallel-size", "2"]
    assert chaos.main([*options, *(["--kv-disk", str(tmp_path / "kv")] if has_tiers else [])]) == 0


@pytest.mark.nightly
@pytest.mark.skipif(bool(ray_network.obstacle()), reason=ray_network.obstacle() or "there can be a cluster")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_faults", [8, 100])
def test_no_fault_of_a_ray_cluster_loses_an_answer(num_faults: int) -> None:
    options = ["--faults", str(num_faults), "--clients", "5", "--hosts", "2", "--tensor-parallel-size", "2"]
    assert chaos.main([*options, "--distributed-executor-backend", "ray"]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_100_faults_lose_no_answer_to_images(num_ranks: int) -> None:
    options = ["--faults", "100", "--clients", "6", "--images"]
    assert chaos.main([*options, "--tensor-parallel-size", str(num_ranks)]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_100_faults_lose_no_answer_of_adapters(num_ranks: int) -> None:
    options = ["--faults", "100", "--clients", "6", "--adapters", "16"]
    assert chaos.main([*options, "--tensor-parallel-size", str(num_ranks)]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_300_faults_lose_no_answer() -> None:
    assert chaos.main(["--faults", "300", "--clients", "8"]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_300_faults_lose_no_answer_of_an_engine_with_tiers(tmp_path: Path) -> None:
    assert chaos.main(["--faults", "300", "--clients", "5", "--kv-disk", str(tmp_path / "kv")]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_no_fault_loses_an_answer_of_an_engine_with_tiers(tmp_path: Path) -> None:
    assert chaos.main(["--faults", "30", "--clients", "4", "--kv-disk", str(tmp_path)]) == 0


def test_the_harness_detects_each_kind_of_loss() -> None:
    clean: dict[str, object] = {
        "differences": [],
        "tokens": 5000,
        "failures": [],
        "hung clients": 0,
        "blocks held at the end": 0,
        "exit code": 0,
        "left behind": [],
    }
    assert chaos.is_clean(clean)
    for spoiled in (
        {"differences": ["x"] * 6},
        {"failures": ["EngineDead"]},
        {"hung clients": 1},
        {"blocks held at the end": 2},
        {"exit code": 1},
        {"left behind": ["core.sock"]},
    ):
        assert not chaos.is_clean(clean | spoiled)
