"""Rounding to 8 bits stays within its stated bounds, in elements and in products; codes survive packing and joining."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenloom.kernels.quantized import (
    Kind,
    QuantizedWeight,
    concatenate,
    from_g_idx,
    pack_halves,
    quantize,
    unpack_halves,
)


def bound_of(kind: str, weight: np.ndarray) -> np.ndarray:
    """How far each element may move: half a step, or of e4m3 half of its spacing (3 bits of mantissa)."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / (127 if kind == "int8" else 448)
    if kind == "int8":
        return np.broadcast_to(scale / 2, weight.shape)
    return np.maximum(np.abs(weight) / 16, scale / 1024)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("seed", range(6))
def test_elements_and_products_stay_within_their_bounds(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    num_out, num_in = int(rng.integers(1, 200)), int(rng.integers(1, 400))
    weight = (rng.standard_normal((num_out, num_in)) * rng.lognormal(0, 2, (num_out, 1))).astype(np.float32)
    weight[rng.integers(num_out)] = 0
    quantized = quantize(torch.from_numpy(weight), "int8" if kind == "int8" else "fp8")
    rounded = quantized.dequantize().double().numpy()
    bound = bound_of(kind, weight.astype(np.float64)) * 1.00001 + 1e-30
    assert (np.abs(rounded - weight) <= bound).all()
    assert np.abs(rounded - weight).max() > 0.3 * bound.max() or num_in < 8  # or the bound says nothing
    x = rng.standard_normal((5, num_in))
    assert (np.abs(x @ rounded.T - x @ weight.T.astype(np.float64)) <= np.abs(x) @ bound.T + 1e-12).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_row_has_the_same_codes_in_any_matrix(kind: Kind) -> None:
    weight = torch.randn(300, 96, generator=torch.Generator().manual_seed(3))
    for group_size in (32, None):
        whole = quantize(weight, kind, torch.bfloat16, group_size)
        codes = whole.qweight.view(torch.uint8)
        for row in (0, 127, 128, 255, 256, 299):  # around the ends of slices
            alone = quantize(weight[row : row + 1], kind, torch.bfloat16, group_size)
            assert torch.equal(codes[row], alone.qweight.view(torch.uint8)[0])
            assert torch.equal(whole.scales[row], alone.scales[0])


def test_codes_of_four_bits_survive_packing() -> None:
    codes = torch.randint(0, 16, (7, 26), dtype=torch.uint8)
    packed = pack_halves(codes)
    assert packed.shape == (7, 13)
    assert int(packed[3, 5]) == int(codes[3, 5]) + 16 * int(codes[3, 18])
    assert torch.equal(unpack_halves(packed), codes)


def random_weight(generator: torch.Generator, groups: torch.Tensor, num_out: int = 6) -> QuantizedWeight:
    num_in, num_groups = len(groups), int(groups.max()) + 1
    codes = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (num_out, num_groups), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_out, num_groups, generator=generator)
    return from_g_idx(codes, scales, zeros, groups, torch.float32)


def test_matrices_of_unlike_groups_are_joined_without_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    runs = torch.arange(24) // 8
    for others in ([runs, runs], [runs, runs.flip(0)], [runs, torch.arange(24) // 5, torch.zeros(24).long()]):
        weights = [random_weight(generator, groups) for groups in others]
        joined = concatenate(weights)
        assert torch.equal(joined.dequantize(), torch.cat([weight.dequantize() for weight in weights]))
    assert concatenate([weights[0], random_weight(generator, runs)]).g_idx is None
    assert torch.equal(concatenate(weights[:1]).dequantize(), weights[0].dequantize())


def test_unused_scales_are_dropped_and_runs_are_found() -> None:
    generator = torch.Generator().manual_seed(1)
    share = random_weight(generator, torch.arange(64, 96) // 16)
    assert share.g_idx is None and share.group_size == 16 and share.scales.shape[1] == 2
    cut = random_weight(generator, torch.arange(72, 96) // 16)
    assert cut.g_idx is not None and cut.scales.shape[1] == 2
