"""Models over a KV cache of bytes: a token has the same bits alone, in a batch, in any chunks and after a preemption;
the C kernels answer as plain torch does over the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tokenloom.kernels.cpu.cpu_ops import make_cpu_ops
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import PagedRun, load

LEVELS = instruction_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")
KINDS = pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=["int8", "e4m3"])
FAMILIES = ["qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gemma4", "gpt2", "qwen2_moe"]
LENGTHS = {"a": 300, "b": 37, "c": 5, "d": 90}  # the first is merged from splits


def answers(
    run: PagedRun, prompts: dict[str, list[int]], draw: random.Random | None, preempted: str = ""
) -> dict[str, torch.Tensor]:
    """Compute prompts; logits [n, vocabulary] of each. draw: in random chunks, in steps that they share; None: each in
    one step, alone. `preempted` begins anew, in other blocks, once half of it is computed."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    left = dict(prompts)
    while left:
        if draw is None:
            taken = {next(iter(left)): len(next(iter(left.values())))}
        else:
            taken = {name: draw.choice([0, 1, 1, 2, 17, 120]) for name in left}
            taken = {name: min(count, len(left[name])) for name, count in taken.items() if count}
        for name, logits in run.step({name: left[name][:count] for name, count in taken.items()}).items():
            found[name].append(logits)
            left[name] = left[name][taken[name] :]
        if preempted in left and len(left[preempted]) < len(prompts[preempted]) / 2:
            found[preempted], left[preempted] = [], prompts[preempted]
            run.forget(preempted)
            preempted = ""
        left = {name: rest for name, rest in left.items() if rest}
    return {name: torch.cat(parts) for name, parts in found.items()}


def draw_prompts(seed: int) -> dict[str, list[int]]:
    draw = random.Random(seed)
    return {name: [draw.randrange(250) for _ in range(length)] for name, length in LENGTHS.items()}


def run_of(folder: Path, ops: Ops, dtype: torch.dtype, stored: torch.dtype, seed: int = 0) -> PagedRun:
    return PagedRun(load(folder, dtype, ops=ops), 16, dtype=stored, seed=seed)


@KINDS
@pytest.mark.parametrize("family", some(FAMILIES, 3))
def test_a_token_has_the_same_bits_alone_in_a_batch_in_chunks_and_after_a_preemption(
    family: str, stored: torch.dtype, tmp_path: Path
) -> None:
    folder, prompts = tiny_checkpoint(tmp_path, family), draw_prompts(1)
    ops = make_cpu_ops(torch.bfloat16, LEVELS[0], is_batch_invariant=True)
    alone = answers(run_of(folder, ops, torch.bfloat16, stored), prompts, None)
    for seed, preempted in enumerate(("", "a", "d")):
        run = run_of(folder, ops, torch.bfloat16, stored, seed)
        together = answers(run, prompts, random.Random(seed), preempted)
        for name, wanted in alone.items():
            assert torch.equal(together[name], wanted), (seed, name)


@KINDS
@pytest.mark.parametrize("family", some(FAMILIES, 3))
def test_the_kernels_answer_as_plain_torch_over_the_same_bytes(
    family: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """A key that differs in its last bits may get the next number, which moves few logits."""
    folder, prompts = tiny_checkpoint(tmp_path, family), draw_prompts(2)
    each = [ReferenceOps(), make_cpu_ops(torch.float32, LEVELS[0])]
    wanted, found = (answers(run_of(folder, ops, torch.float32, stored), prompts, random.Random(3)) for ops in each)
    for name, logits in wanted.items():
        size = logits.abs().max()
        distance = (found[name] - logits).abs() / size
        assert distance.mean() < 1e-3 and distance.max() < 0.05, (name, float(distance.mean()), float(distance.max()))
