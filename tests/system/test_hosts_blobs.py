"""Adapters and images reach all hosts of an engine, which answers as one process does, also over three hosts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenloom import Client
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.scripts.chaos.chaos import VISION_MODEL, about_images
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.chaos_work import Work, answers, check_equal, make_work, with_adapters, without_effect
from tokenloom.tests.support.network_hosts import Network, SpreadEngine, obstacle
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.system.launched import LaunchedEngine

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can"),
    pytest.mark.timeout(240),
]

EXACT = ["--dtype", "float32", "--max-num-batched-tokens", "64", "--max-num-seqs", "24"]
FEW_BLOCKS = ["--num-kv-blocks", "160", "--max-model-len", "1024"]  # so that requests preempt one another


def check_hosts(folder: Path, work: Sequence[Work], options: Sequence[str], num_hosts: int, num_ranks: int) -> None:
    """Check that an engine over hosts answers as one process does."""
    (folder / "calm").mkdir()
    with LaunchedEngine(folder / "calm", *options) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            calm = answers(client, work)
        assert engine.stop() == 0
    assert not without_effect(work, calm)
    spread = ["--tp", str(num_ranks), "--hosts", str(num_hosts)]
    with Network(folder, num_hosts) as network:
        for number in range(1, num_hosts):
            network.join(number)
        with SpreadEngine(network, *options, *spread) as engine:
            engine.wait_ready()
            with Client(engine.address) as client:
                check_equal(calm, answers(client, work))
            assert engine.stop() == 0
        for agent in network.agents:
            agent.wait_none(agent.alive)
            agent.wait_none(agent.files)


def test_adapters_on_two_hosts_answer_as_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapters = write_adapters(tmp_path / "adapters", DEMO_FOLDER, 3)
    rng = random.Random(4)
    work = with_adapters(make_work(rng)[:3], [path.name for path in adapters], rng)
    modules = [f"{path.name}={path}" for path in adapters]
    slots = ["--max-loras", "2", "--max-lora-rank", "16"]
    options = [*EXACT, "--enable-lora", *slots, "--lora-modules", *modules]
    check_hosts(tmp_path, work, options, num_hosts=2, num_ranks=2)


def test_images_on_two_hosts_answer_as_in_one_process(tmp_path: Path) -> None:
    rng = random.Random(5)
    work = about_images(make_work(rng)[:6], rng)
    model = vision_checkpoint(tmp_path / "model", VISION_MODEL)
    check_hosts(tmp_path, work, [*EXACT, "--model", str(model)], num_hosts=2, num_ranks=2)


def test_four_ranks_on_three_hosts_answer_as_one_process_with_preemption(tmp_path: Path) -> None:
    work = make_work(random.Random(6), num_sentences=20)
    check_hosts(tmp_path, [*work, *work], [*EXACT, *FEW_BLOCKS], num_hosts=3, num_ranks=4)
