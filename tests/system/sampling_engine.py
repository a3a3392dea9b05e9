"""The engine of the sampling tests: a tiny random model, prompts of bytes, schedules that must not matter; and
the fixtures that its files import."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import LLM
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.logprob_oracle import LogprobOracle

VOCAB_SIZE = 300  # most ids are bytes, so that answers have text
NEAR_TIE = 1e-4

BASE: dict[str, object] = {"in_process": True, "num_threads": 1, "max_model_len": 400, "block_size": 8}
SCHEDULES: dict[str, dict[str, object]] = {
    "preempted": {"num_kv_blocks": 34, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 160},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "prefix hit": {},
    "overlapped": {"steps_in_flight": 2, "enable_prefix_caching": False, "max_num_seqs": 6},
}


def sampling_checkpoint(folder: Path) -> Path:
    return tiny_checkpoint(folder, "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2)


def open_llm(folder: Path, **options: object) -> LLM:
    return LLM(folder, **(BASE | options))  # type: ignore[arg-type]


def make_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(40)]
    return [stem[: rng.randrange(41)] + [rng.randrange(256) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampling_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LogprobOracle:
    return LogprobOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm
