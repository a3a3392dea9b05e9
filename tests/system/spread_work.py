"""The work of engines over several hosts, and the comparison with the answers of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support import chaos_work
from tokenloom.tests.support.chaos_work import Work, make_work
from tokenloom.tests.system.launched import LaunchedEngine

EXACT = ["--dtype", "float32", "--max-num-batched-tokens", "64", "--max-num-seqs", "24"]
LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=160, ignore_eos=True)
PROMPT = "The capital of Peru is"


@pytest.fixture(scope="module")
def work() -> list[Work]:
    """Requests of many kinds, and last a long one."""
    return [*make_work(random.Random(3))[::2], Work("long", PROMPT, LONG)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, work: list[Work]) -> list[RequestOutput]:
    return calm_answers(tmp_path_factory.mktemp("calm"), work)


def calm_answers(folder: Path, work: list[Work]) -> list[RequestOutput]:
    """Return the answers of one process."""
    with LaunchedEngine(folder, *EXACT) as engine:
        engine.wait_ready()
        found = answers(engine.address, work)
        assert engine.stop() == 0
    return found


def answers(address: str, work: list[Work]) -> list[RequestOutput]:
    with Client(address, reconnect_timeout_s=120) as client:
        return chaos_work.answers(client, work)


def check_long(engine: Engine, calm: list[RequestOutput], fault: Callable[[], None]) -> None:
    """Check the text of the long answer, during which `fault` strikes."""
    with Client(engine.address, reconnect_timeout_s=120) as client:
        pieces = client.stream(PROMPT, LONG)
        text = "".join(next(pieces) for _ in range(20))
        fault()
        assert text + "".join(pieces) == calm[-1].outputs[0].text


def is_ready(engine: Engine) -> bool:
    with Client(engine.address) as client:
        return client.health().is_ready
