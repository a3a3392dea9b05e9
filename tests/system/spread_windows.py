"""Models with windows over several hosts: requests, and the check of their answers by transformers.

Prompts and answers are longer than a window and than a step, so that each rank frees blocks while it computes; some
begin alike, so that requests continue behind blocks that others have left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenloom import SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import RECOVERY_S, reconnecting
from tokenloom.tests.system.oracle import GreedyOracle

WINDOW, NUM_ANSWERED, NUM_REQUESTS = 64, 120, 10
OPTIONS = ["--dtype", "float32", "--max-model-len", "384", "--max-num-seqs", "6", "--max-num-batched-tokens", "24"]
OPTIONS += ["--tp", "2", "--hosts", "2"]


def new_windowed(folder: Path) -> Path:
    """Write a Gemma 3 with a window of 64 in three of its four layers. With a tied head it would repeat its input."""
    return tiny_checkpoint(
        folder, "gemma3_text", sliding_window=WINDOW, sliding_window_pattern=4, tie_word_embeddings=False
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_windowed(tmp_path_factory.mktemp("windowed") / "model")


@pytest.fixture(scope="module")
def oracle(windowed: Path) -> Iterator[GreedyOracle]:
    oracle = GreedyOracle(windowed)
    yield oracle
    oracle.close()


def make_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(150)]
    return [
        stem[: rng.randrange(151)] + [rng.randrange(256) for _ in range(1 + rng.randrange(60))]
        for _ in range(NUM_REQUESTS)
    ]


def check_windows(engine: Engine, oracle: GreedyOracle, seed: int, fault: Callable[[], object] | None = None) -> None:
    """Check answers to prompts of a seed, during which `fault` strikes, by transformers."""
    prompts = make_prompts(seed)
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
    with reconnecting(engine) as client:
        num_restarts = client.health().num_restarts
        futures = [client.submit(prompt, params) for prompt in prompts]
        if fault is not None:
            wait_running(client, 2 * NUM_REQUESTS)
            fault()
            assert not all(future.done() for future in futures), "the requests ended before the process"
        outputs = [future.result(timeout=RECOVERY_S) for future in futures]
        assert (client.health().num_restarts > num_restarts) == (fault is not None)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == NUM_ANSWERED
        oracle.check(prompt, output.outputs[0].token_ids)
