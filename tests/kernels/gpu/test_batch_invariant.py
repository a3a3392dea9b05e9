"""With --deterministic a GPU gives a request the same bits in any batch and chunk, after a hit and after preemption.

In the interpreter; tests/gpu has the same on a device. Tolerance against the reference: 2e-5 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import Routing
from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.sampling.logprobs import logsumexp
from tokenloom.kernels.quantized import quantize
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import PagedRun, load

BLOCK_SIZE, LENGTH = 16, 36

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}

pytestmark = pytest.mark.usefixtures("in_order")


@pytest.mark.parametrize("form", some([None, "int8"], 1))
def test_fused_moe_is_the_references_and_tokens_are_independent(form: Literal["int8"] | None) -> None:
    torch.manual_seed(0)
    x, scores, num_experts, inner = torch.randn(40, 48), torch.randn(40, 5), 5, 24
    shapes = ((2 * inner, 48), (48, inner))
    gate_up, down = ([torch.randn(*shape) / 4 for _ in range(num_experts)] for shape in shapes)
    if form is not None:
        gate_up, down = ([quantize(weight, form) for weight in weights] for weights in (gate_up, down))
    ops, reference = BatchInvariantTritonOps(90), ReferenceOps()
    packed = ops.pack_experts(gate_up, down)
    together = ops.fused_moe(x, scores, packed, Routing(3, is_normalized=True))
    wanted = reference.fused_moe(x, scores, reference.pack_experts(gate_up, down), Routing(3, is_normalized=True))
    torch.testing.assert_close(together, wanted, atol=2e-5, rtol=2e-5)
    for rows in ([0], [39], [3, 30], list(range(17, 36))):
        assert torch.equal(ops.fused_moe(x[rows], scores[rows], packed, Routing(3, is_normalized=True)), together[rows])


def test_logsumexp_is_torchs_and_rows_are_independent() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 9000) * 10
    logits[2, :8000] = -torch.inf
    totals = logsumexp(logits)
    torch.testing.assert_close(totals, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    assert torch.equal(logsumexp(logits[3:4]), totals[3:4])


def alone(run: PagedRun, tokens: list[int]) -> Tensor:
    return run.step({"a": tokens})["a"]


def among_others(run: PagedRun, tokens: list[int]) -> Tensor:
    rng = np.random.default_rng(1)
    others = {f"o{i}": rng.integers(0, 200, int(rng.integers(1, 9))).tolist() for i in range(2)}
    return run.step({**others, "a": tokens})["a"]


def chunked(run: PagedRun, tokens: list[int]) -> Tensor:
    bounds = [0, 7, 8, 33, 34, LENGTH]
    return torch.cat([run.step({"a": tokens[i:j], "b": [i]})["a"] for i, j in pairwise(bounds)])


@pytest.mark.parametrize(
    ("family", "window", "ways"), [("qwen3", None, (among_others, chunked)), ("mistral", 20, (chunked,))]
)
def test_logits_have_the_same_bits_in_any_way(
    family: str, window: int | None, ways: Sequence[Callable[[PagedRun, list[int]], Tensor]], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, family, num_hidden_layers=1, sliding_window=window, **SHAPE)
    tokens = np.random.default_rng(0).integers(0, 200, LENGTH).tolist()
    model = load(folder, ops=BatchInvariantTritonOps(90))
    wanted = alone(PagedRun(model, BLOCK_SIZE), tokens)
    for way in ways:  # after a hit or preemption: chunked
        assert torch.equal(way(PagedRun(model, BLOCK_SIZE, seed=3), tokens), wanted), way
    reference = alone(PagedRun(load(folder, ops=ReferenceOps()), BLOCK_SIZE), tokens)
    torch.testing.assert_close(wanted, reference, atol=2e-5, rtol=2e-5)
