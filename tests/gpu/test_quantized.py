"""On a GPU: products with quantized matrices and experts are the reference's, models those that the codes stand for.

Tolerances are relative to the largest element of the reference in float32: TOLERANCE[dtype].
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from tokenloom.kernels.contract import Routing
from tokenloom.kernels.quantized import QuantizedWeight
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import select_ops
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.kernels.gpu.test_matmul import FORMS, random_weight
from tokenloom.tests.support.quantized_checkpoints import FORMATS, quantized_pair
from tokenloom.tests.workers.models.test_decoder import oracle, prompts_of, run_schedule, schedule
from tokenloom.tests.workers.paged_run import PagedRun, load

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def on_device(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> QuantizedWeight:
    tensors = {
        field.name: getattr(weight, field.name).to(device)
        for field in dataclasses.fields(weight)
        if isinstance(getattr(weight, field.name), torch.Tensor)
    }
    return dataclasses.replace(weight, dtype=dtype, **tensors)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype] * max(float(expected.abs().max()), 1e-3)
    torch.testing.assert_close(actual.cpu().float(), expected, atol=bound, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_quantized_linears_agree_with_the_reference(form: str, dtype: torch.dtype, device: torch.device) -> None:
    rng, ops, reference = random.Random(form), select_ops(device, dtype), ReferenceOps()
    torch.manual_seed(0)
    for num_rows, num_out, num_in in SIZES.products:
        weight = random_weight(rng, form, num_out, num_in, torch.float32)
        x, bias = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_out).to(dtype)
        expected = reference.linear(x.float(), reference.pack_linear(weight, bias.float()))
        packed = ops.pack_linear(on_device(weight, device, dtype), bias.to(device))
        assert_near(ops.linear(x.to(device), packed), expected, dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["int4", "fp8 blocks", "float"])
def test_mixed_experts_agree_with_the_reference(form: str, dtype: torch.dtype, device: torch.device) -> None:
    rng, ops, reference = random.Random(form), select_ops(device, dtype), ReferenceOps()
    torch.manual_seed(0)
    num_experts, hidden, inner = SIZES.experts
    for num_tokens in SIZES.expert_tokens:
        x, scores = torch.randn(num_tokens, hidden).to(dtype), torch.randn(num_tokens, num_experts).to(dtype)
        weights, here = [], []
        for num_out, num_in in ((2 * inner, hidden), (hidden, inner)):
            kind = "int4" if form == "float" else form
            quantized = [random_weight(rng, kind, num_out, num_in, torch.float32) for _ in range(num_experts)]
            if form == "float":
                plain = [weight.dequantize().to(dtype) for weight in quantized]
                weights.append([weight.float() for weight in plain])
                here.append([weight.to(device) for weight in plain])
            else:
                weights.append(quantized)
                here.append([on_device(weight, device, dtype) for weight in quantized])
        packed = reference.pack_experts(*weights)
        expected = reference.fused_moe(x.float(), scores.float(), packed, Routing(6, is_normalized=True))
        actual = ops.fused_moe(x.to(device), scores.to(device), ops.pack_experts(*here), Routing(6, is_normalized=True))
        assert_near(actual, expected, dtype)


@pytest.mark.parametrize(
    ("form", "family"), [*((form, "llama") for form in FORMATS), ("awq", "mixtral"), ("fp8, blocks", "qwen3_moe")]
)
def test_logits_equal_transformers_on_the_floats(form: str, family: str, device: torch.device, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    quantized, plain = quantized_pair(tmp_path, form, family, intermediate_size=72, **shape)
    lengths = {"a": 40, "b": 1, "c": 17}
    tokens = prompts_of(lengths, 260, seed=1)
    run = PagedRun(load(quantized, device=device), 16, device=device)
    expected, actual = oracle(plain, tokens), run_schedule(run, tokens, schedule(lengths, seed=2))
    for name in tokens:
        message = partial("{}: {}: {}".format, form, name)
        torch.testing.assert_close(actual[name].cpu(), expected[name], atol=1e-4, rtol=0, msg=message)
