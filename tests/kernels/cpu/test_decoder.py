"""The fused decoder equals its layers, and the reference, within rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenloom.kernels.cpu.cpu_ops import make_cpu_ops
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.paged_run import PagedRun, load

LEVELS = instruction_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")
ODD = {"hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 100}  # nothing is a whole number of lines


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_more_threads_than_cores_do_not_change_a_bit(
    family: str, tmp_path: Path, num_threads: Callable[[int], None]
) -> None:
    """Most of 16 threads arrive after a stage has ended, or lose their core during a piece."""
    model = load(tiny_checkpoint(tmp_path, family), torch.bfloat16, ops=make_cpu_ops(torch.bfloat16, LEVELS[0]))
    answers = []
    for count in (1, 2, 16, 16):
        num_threads(count)
        paged = PagedRun(model, 16, dtype=torch.bfloat16)
        steps = [paged.step({"long": [id % 250 for id in range(400)], "short": [7] * 5})]  # long: merged from splits
        steps += [paged.step({"long": [id], "short": [id + 1]}) for id in range(30)]
        answers.append([step[name] for step in steps for name in ("long", "short")])
    for other in answers[1:]:
        assert all(map(torch.equal, other, answers[0]))


def test_a_step_without_tokens_is_legal(tmp_path: Path, num_threads: Callable[[int], None]) -> None:
    model = load(tiny_checkpoint(tmp_path, "llama"), torch.float32, ops=make_cpu_ops(torch.float32, LEVELS[0]))
    num_threads(2)
    assert PagedRun(model, 16).step({}) == {}


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("gpt2", {"n_positions": 16})],  # rotary, learned
)
def test_a_context_past_the_tables_of_positions_is_an_error(
    family: str, fields: dict[str, object], tmp_path: Path
) -> None:
    ops = make_cpu_ops(torch.float32, LEVELS[0])
    run = PagedRun(load(tiny_checkpoint(tmp_path, family, **fields), max_model_len=16, ops=ops), 16)
    run.step({"a": [1] * 16})
    with pytest.raises(AssertionError, match="longer than the table"):
        run.step({"a": [1]})
