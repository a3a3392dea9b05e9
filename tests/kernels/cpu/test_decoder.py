"""The fused decoder equals its layers, and the reference, within rounding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import DecoderWeights
from tokenloom.kernels.cpu.cpu_ops import CpuOps, make_cpu_ops
from tokenloom.kernels.cpu.loader import load_level
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.paged_run import PagedRun, load, make_metadata
from tokenloom.workers.model_step import StepContext

LEVELS = instruction_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")


class LayeredOps(CpuOps):
    def fuse_decoder(self, weights: DecoderWeights) -> None:
        return None


def run(folder: Path, ops: Ops, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Compute the logits of a schedule: chunked prompts beside decode rows, one longer than several sliding windows."""
    draw = random.Random(1)
    paged = PagedRun(load(folder, dtype, ops=ops), 16, dtype=dtype)
    tokens = {name: [draw.randrange(250) for _ in range(length)] for name, length in (("a", 90), ("b", 40), ("c", 7))}
    steps: list[dict[str, list[int]]] = [
        {"a": tokens["a"][:50]},
        {"a": tokens["a"][50:], "b": tokens["b"][:1]},
        {"a": [5], "b": tokens["b"][1:], "c": tokens["c"]},
        *({"a": [step], "b": [step + 1], "c": [step + 2]} for step in range(3)),
    ]
    return [paged.step(step) for step in steps]


BIASES = {"attention_bias": True, "mlp_bias": True}
ODD = {"hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 100}  # nothing is a whole number of lines


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", BIASES),
        ("llama", {**ODD, **BIASES}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.25)])
def test_fused_layered_and_reference_agree(
    tmp_path: Path, family: str, fields: dict[str, object], dtype: torch.dtype, tolerance: float
) -> None:
    """Logits deviate by 3; in bf16 the roundings of two layers are allowed for."""
    folder = tiny_checkpoint(tmp_path, family, **fields)
    layered = LayeredOps(load_level(LEVELS[0], dtype == torch.bfloat16).library, dtype)
    exact = run(folder, ReferenceOps(), torch.float32)
    for ops in (make_cpu_ops(dtype, LEVELS[0]), layered):
        for step, expected in zip(run(folder, ops, dtype), exact, strict=True):
            for name, logits in expected.items():
                torch.testing.assert_close(step[name], logits, rtol=0, atol=tolerance)


def test_logits_follow_the_order_of_logits_indices(tmp_path: Path) -> None:
    """The step has more tokens than a group of a panel; the indices are partial, unordered and repeated."""
    model = load(tiny_checkpoint(tmp_path, "llama", **ODD), torch.float32, ops=make_cpu_ops(torch.float32, LEVELS[0]))
    token_ids, kv_cache = torch.arange(40, dtype=torch.int32), PagedRun(model, 16).kv_cache
    context = StepContext(make_metadata([(0, 40, [3, 1, 2])], 16), kv_cache)
    hidden, logits = model.forward_logits(token_ids, torch.arange(40), context)
    every, hidden = logits.clone(), hidden.clone()
    for chosen in ([39], [7, 30, 7, 0], list(range(39, -1, -2)), []):
        again, logits = model.forward_logits(token_ids, torch.tensor(chosen, dtype=torch.int64), context)
        assert torch.equal(logits, every[chosen]) and torch.equal(again, hidden)
    torch.testing.assert_close(model.compute_logits(hidden), every, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_a_decode_rows_logits_do_not_depend_on_the_rows_beside_it(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    prompts = {str(row): [row + 1] * (3 + 5 * row) for row in range(7)}
    together = PagedRun(
        load(folder, torch.bfloat16, ops=make_cpu_ops(torch.bfloat16, LEVELS[0])), 16, dtype=torch.bfloat16
    )
    together.step(prompts)
    answers = together.step({name: [9] for name in prompts})
    for name, prompt in prompts.items():
        alone = PagedRun(together.model, 16, dtype=torch.bfloat16)
        alone.step({name: prompt})
        assert torch.equal(alone.step({name: [9]})[name], answers[name])


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
