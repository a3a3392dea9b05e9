"""Models with windows smaller than a chunk and a prompt: each group of layers frees its own blocks, and no answer
changes."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from tokenloom import SamplingParams
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.support.uneven_checkpoints import uneven_checkpoint
from tokenloom.tests.system.fleet import wait_running
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, reconnecting, serve
from tokenloom.tests.system.loss_turns import turn_of
from tokenloom.tests.system.oracle import GreedyOracle

pytestmark = turn_of("groups")

UNEVEN = "gemma4, five groups"
FAMILIES = ["gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo3", "cohere2", "gemma4_moe", UNEVEN]
LONGEST = 120  # tokens, answer included
FLAGS = f"--dtype float32 --max-model-len {LONGEST} --block-size 4 --max-num-seqs 6 --max-num-batched-tokens 7"


def models_of(folder: Path, family: str) -> tuple[Path, Path]:
    """Write a model; return it and the one that transformers reads in its place."""
    if family == UNEVEN:
        return uneven_checkpoint(folder)
    made = tiny_checkpoint(folder, family, **{"sliding_window": 12} if family == "mistral" else {})
    return made, made


@pytest.mark.parametrize(("family", "role"), some(list(product(FAMILIES, ["core", "worker 0"])), 1))
def test_a_kill_beside_drafts_and_two_ranks_changes_no_answer(family: str, role: str, tmp_path: Path) -> None:
    folder, reference = models_of(tmp_path / "m", family)
    rng, vocab_size = random.Random(len(family)), load_model_config(folder).vocab_size
    stem = [rng.randrange(vocab_size) for _ in range(30)]
    prompts = [stem[: 5 * i % 31] + [rng.randrange(vocab_size) for _ in range(1 + i % 9)] for i in range(16)]
    params = [SamplingParams(temperature=0, max_tokens=60, n=1 + i % 2, ignore_eos=True) for i in range(16)]
    arguments = ["--model", str(folder), *FLAGS.split(), "--speculation", "lookup", "--tensor-parallel-size", "2"]
    for engine in serve(LaunchedEngine(tmp_path, *arguments)):
        with reconnecting(engine) as client:
            futures = [client.submit(*each) for each in zip(prompts, params, strict=True)]
            wait_running(client, 60)
            engine.child(role).kill()
            assert not all(future.done() for future in futures), "the requests ended before the process"
            outputs = [future.result(timeout=RECOVERY_S) for future in futures]
    oracle = GreedyOracle(reference)
    for prompt, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            assert len(answer.token_ids) == 60
            oracle.check(prompt, answer.token_ids)
    oracle.close()
