"""The small Triton kernels against the reference, over random shapes, in the interpreter.

Tolerances: float32 2e-6 relative to values of size 1; float16 2e-3 (two roundings; the reference rounds between norm
and rotation, the kernel does not).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tokenloom.kernels import byte_cache
from tokenloom.kernels.contract import Activation, ActivationKind, HeadNorms, Norm, NormKind, Rotary
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.gpu.shapes import from_bytes, next_number, paged_step
from tokenloom.tests.support.today import some, some_pairs

TOLERANCES = {torch.float32: 4e-6, torch.float16: 4e-3}


def check_close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result, wanted, atol=tolerance, rtol=tolerance)


NORMS: list[tuple[NormKind, bool, bool]] = [  # kind, with a weight, with a bias
    ("rms", True, False),
    ("rms", False, False),
    ("layer", True, True),
    ("layer", True, False),
    ("layer", False, False),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("shape", "form"), some_pairs([(0, 8), (1, 1), (17, 100), (1, 1024), (3, 5000)], NORMS, 3))
def test_norms_are_the_references(
    shape: tuple[int, int], form: tuple[NormKind, bool, bool], dtype: torch.dtype
) -> None:
    (num_tokens, width), (kind, has_weight, has_bias) = shape, form
    torch.manual_seed(width)
    x, residual = torch.randn(num_tokens, width).add(2).to(dtype), torch.randn(num_tokens, width).to(dtype)
    weight, bias = torch.randn(width) if has_weight else None, torch.randn(width) if has_bias else None
    norm, copy = Norm(kind, weight, bias, 1e-5), residual.clone()
    check_close(TritonOps(90).norm(x, norm), ReferenceOps().norm(x, norm))
    check_close(TritonOps(90).add_norm(x, copy, norm), ReferenceOps().add_norm(x, residual, norm))
    assert torch.equal(copy, residual)


KINDS: list[ActivationKind] = ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
ACTIVATIONS = [Activation(kind, is_gated) for kind in KINDS for is_gated in (False, True)]
ACTIVATIONS += [Activation("clamp", limit=0.75), Activation("swiglu_clamped", True, 0.75)]


@pytest.mark.parametrize(("num_tokens", "activation"), some_pairs([0, 1, 7], ACTIVATIONS, 2))
def test_a_linear_layer_with_an_activation_is_the_references(activation: Activation, num_tokens: int) -> None:
    rng = random.Random(f"{activation} {num_tokens}")
    torch.manual_seed(rng.getrandbits(32))
    dtype = rng.choice(list(TOLERANCES))
    width = rng.choice([1, 5, 100, 1030])
    x, weight = torch.randn(num_tokens, 24).to(dtype), torch.randn(2 * width, 24).div(5).to(dtype)
    bias = rng.choice([None, torch.randn(2 * width).to(dtype)])
    results = [ops.linear(x, ops.pack_linear(weight, bias, activation)) for ops in (TritonOps(90), ReferenceOps())]
    check_close(*results)


@pytest.mark.parametrize("seed", some(range(40), 4))
def test_gemv_is_the_references(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(TOLERANCES))
    num_inputs, num_outputs = rng.choice([1, 24, 1000, 1024, 3072, 5000, 9000]), rng.choice([1, 2, 9, 67])
    x, weight = torch.randn(1, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
    weight.div_(num_inputs**0.5)
    bias = rng.choice([None, torch.randn(num_outputs).to(dtype)])
    results = [
        (ops.linear(x, ops.pack_linear(weight, bias)), ops.logits(x, ops.pack_linear(weight, bias)))
        for ops in (TritonOps(90), ReferenceOps())
    ]
    (outputs, scores), (wanted, wanted_scores) = results
    check_close(outputs, wanted)
    assert scores.dtype == wanted_scores.dtype == torch.float32
    check_close(scores.to(dtype), wanted_scores.to(dtype))
    assert torch.equal(scores, outputs.float())  # rounded alike, so that tokens do not depend on the kernel


@dataclass(frozen=True)
class HeadForm:
    """The norms and rotation of query and key heads of D elements."""

    norm: NormKind | None = None
    weight: str = "shared"  # by all heads; "per head", "spanning" all heads of a token, or "none"
    has_bias: bool = False
    is_after_rope: bool = False
    rotation: float = 1.0  # part of the elements
    has_query_scale: bool = False

    def norms(self, num_heads: int, num_kv_heads: int, head_dim: int) -> HeadNorms | None:
        if self.norm is None:
            return None
        drawn = []
        for count in (num_heads, num_kv_heads):
            shape = (head_dim,) if self.weight == "shared" else (count, head_dim)
            weight = None if self.weight == "none" else torch.randn(shape)
            drawn.append(Norm(self.norm, weight, torch.randn(shape) if self.has_bias else None, 1e-2))
        return HeadNorms(drawn[0], drawn[1], self.weight == "spanning", self.is_after_rope)

    def rotary(self, num_positions: int, head_dim: int) -> Rotary:
        num_rotated = int(head_dim * self.rotation) // 2 * 2
        cos_sin = torch.randn(num_positions, num_rotated) if num_rotated else None
        return Rotary(cos_sin, torch.rand(num_positions) + 0.5 if self.has_query_scale else None)


HEAD_FORMS = [
    HeadForm(),
    HeadForm("rms"),
    HeadForm("rms", weight="none"),
    HeadForm("rms", is_after_rope=True),
    HeadForm("rms", weight="spanning"),
    HeadForm("rms", weight="spanning", is_after_rope=True, rotation=0.5),
    HeadForm("rms", weight="per head", has_bias=True, is_after_rope=True, rotation=0.25, has_query_scale=True),
    HeadForm("rms", rotation=0.0),
    HeadForm("layer"),
    HeadForm("layer", has_bias=True, rotation=0.5),
    HeadForm("layer", weight="per head", rotation=0.25),
    HeadForm("layer", weight="spanning", has_bias=True, rotation=0.5),
    HeadForm(rotation=0.5, has_query_scale=True),
    HeadForm(rotation=0.0),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, of the overflowed request
@pytest.mark.parametrize(("form", "seed"), some_pairs(HEAD_FORMS, range(8), 12), ids=str)
def test_qk_norm_rope_cache_is_the_references(form: HeadForm, seed: int) -> None:
    rng = random.Random(f"{form} {seed}")
    torch.manual_seed(rng.getrandbits(32))
    dtype, head_dim = rng.choice(list(TOLERANCES)), rng.choice([16, 64, 80, 96, 128, 256])
    group, num_kv_heads, block_size = rng.choice([1, 2, 5, 8, 16]), rng.choice([1, 2, 3]), rng.choice([16, 32, 128])
    lengths = [rng.randrange(1, 300) for _ in range(rng.randrange(0, 3))]
    step = paged_step(rng, lengths, [(5, 3), (0, 4)], dtype, head_dim, group, num_kv_heads, block_size, None)
    metadata = step.metadata
    num_tokens = metadata.query_starts_host[-1]
    metadata.slots[rng.randrange(num_tokens)] = -1
    heads = torch.randn(num_tokens, (group + 2) * num_kv_heads, head_dim).to(dtype)
    if num_tokens > 1:  # an overflowed request
        heads[1, -1, 0], heads[1, -1, 1], heads[1, -num_kv_heads - 1, 2] = torch.nan, torch.inf, -torch.inf
    norms, rotary = form.norms(group * num_kv_heads, num_kv_heads, head_dim), form.rotary(310, head_dim)
    caches = [step.kv_cache.clone(), step.kv_cache.clone()]
    queries = [
        ops.qk_norm_rope_cache(heads.clone(), norms, rotary, cache, 1, metadata)
        for ops, cache in zip((TritonOps(90), ReferenceOps()), caches, strict=True)
    ]
    check_close(*queries)
    check_close(caches[0][1:], caches[1][1:])  # the null block may hold anything
    assert caches[0].isfinite().all()


@pytest.mark.parametrize("seed", some(range(60), 6))
def test_keys_stored_in_8_bits_are_the_references(seed: int) -> None:
    bytes_of = (torch.int8, torch.uint8)[seed % 2]
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, head_dim = rng.choice(list(TOLERANCES)), rng.choice([16, 64, 80, 128, 256])
    group, num_kv_heads, block_size = rng.choice([1, 2, 8]), rng.choice([1, 2, 3]), rng.choice([16, 32, 128])
    step = paged_step(rng, [40], [(5, 3)], dtype, head_dim, group, num_kv_heads, block_size, None, bytes_of)
    num_tokens = step.metadata.query_starts_host[-1]
    heads = torch.randn(num_tokens, (group + 2) * num_kv_heads, head_dim).mul(rng.choice([1e-3, 1, 300])).to(dtype)
    heads[0, -1] = 0
    cos_sin = torch.randn(310, head_dim // rng.choice([1, 2]))  # the rest of a head is not rotated
    caches = [step.kv_cache.clone(), step.kv_cache.clone()]
    for ops, cache in zip((TritonOps(90), ReferenceOps()), caches, strict=True):
        ops.qk_norm_rope_cache(heads.clone(), None, Rotary(cos_sin), cache, 1, step.metadata)
    stored, wanted = (from_bytes(cache)[1:] for cache in caches)
    numbers, scales = (part[1:] for part in byte_cache.parts(caches[1].flatten(-2), block_size))
    torch.testing.assert_close(byte_cache.parts(caches[0].flatten(-2), block_size)[1][1:], scales, atol=0, rtol=2e-3)
    # A number that was rounded up to a power of two is half of it in the interpreter (triton 3.6 and 3.9).
    is_power = (numbers & 7) == 0 if bytes_of == torch.uint8 else torch.zeros_like(numbers, dtype=torch.bool)
    bound = next_number(wanted, bytes_of) * 1.01  # a rotation that rounds otherwise may cross to it
    distance = torch.where(is_power, 0, (stored - wanted).abs())
    assert (distance <= bound).all()
    assert (distance > 2e-3 * wanted.abs()).float().mean() < 0.02
