"""Codes that are kept in their own bits stand for the floats of gguf-py: in products, in look-ups, on every level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.spec.config.gguf_index import BLOCKS, EXACT_KINDS
from tokenloom.kernels.contract import GATED_SILU
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.cpu.loader import load_level
from tokenloom.tests.kernels.cpu.levels import EMULATED_AMX, LEVELS, kinds
from tokenloom.tests.kernels.cpu.test_codes import check, rounded
from tokenloom.tests.support.gguf_files import hostile_bytes, random_bytes, write_matrices
from tokenloom.workers.weights.checkpoint import TensorSlice
from tokenloom.workers.weights.gguf_checkpoint import GgufCheckpoint

SHAPE = (70, 768)  # three large blocks of a row, and no multiple of a pair of tiles
ROWS = (1, 2, 5, 6, 13, 33)
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
KINDS = [kind for kind in kinds() if kind[0] == torch.bfloat16]

of_each_level = pytest.mark.parametrize("kind", KINDS, indirect=True, ids=str, scope="session")
of_each_format = pytest.mark.parametrize("stored", EXACT_KINDS)


def largest_bytes(stored: str, byte: int) -> np.ndarray:
    """Return rows whose codes and multiples have all bits of a byte: [rows, bytes] uint8."""
    blocks = np.full((SHAPE[0] * SHAPE[1] // 256, BLOCKS[stored][1]), byte, np.uint8)
    for at in HALVES[stored]:
        blocks[:, at : at + 2] = np.array([0.001], np.float16).view(np.uint8)
    return blocks.reshape(SHAPE[0], -1)


@pytest.fixture(scope="module")
def matrices() -> dict[str, np.ndarray]:
    found = {}
    for seed, stored in enumerate(EXACT_KINDS):
        found[f"tame.{stored}"] = random_bytes(stored, SHAPE, seed)
        found[f"hostile.{stored}"] = hostile_bytes(stored, SHAPE, seed)
    for stored in HALVES:
        found |= {f"{name}.{stored}": largest_bytes(stored, byte) for name, byte in (("all", 0xFF), ("some", 0x80))}
    return found


@pytest.fixture
def checkpoint(matrices: dict[str, np.ndarray], tmp_path: Path) -> Iterator[GgufCheckpoint]:
    write_matrices(tmp_path, {name: (name.split(".")[1], SHAPE, data) for name, data in matrices.items()})
    with GgufCheckpoint(tmp_path, torch.bfloat16, torch.device("cpu")) as opened:
        opened.keeps_blocks = True
        yield opened


@pytest.fixture(scope="module")
def ops(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    return CpuOps(library, kind[0], has_integer_products=True)


def floats_of(stored: str, data: np.ndarray) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[stored])))


def outputs(ops: CpuOps, checkpoint: GgufCheckpoint, name: str, x: Tensor) -> Tensor:
    rows = checkpoint.load_blocks(TensorSlice(name, SHAPE))
    assert rows is not None
    return ops.logits(x, ops.pack_linear(rows, None))


@of_each_level
@of_each_format
def test_products_are_those_of_the_floats_and_the_rounded_rows(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint, matrices: dict[str, np.ndarray]
) -> None:
    torch.manual_seed(1)
    exact = floats_of(stored, matrices[f"tame.{stored}"]).double()
    x = (torch.randn(max(ROWS), SHAPE[1]) * torch.rand(max(ROWS), 1).mul(9).exp()).bfloat16()
    x[-1, : SHAPE[1] // 2] = 0
    check(outputs(ops, checkpoint, f"tame.{stored}", x), rounded(x) @ exact.T)


@of_each_level
@pytest.mark.parametrize("stored", HALVES)
def test_sums_of_the_largest_codes_scales_and_inputs_are_exact(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint, matrices: dict[str, np.ndarray]
) -> None:
    x = torch.cat([torch.ones(2, SHAPE[1]), -torch.ones(3, SHAPE[1])]).bfloat16()
    for name in ("all", "some"):
        exact = floats_of(stored, matrices[f"{name}.{stored}"]).double()
        check(outputs(ops, checkpoint, f"{name}.{stored}", x), x.double() @ exact.T)


@of_each_level
@of_each_format
def test_only_outputs_with_scales_that_are_no_numbers_are_none(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint, matrices: dict[str, np.ndarray]
) -> None:
    exact = floats_of(stored, matrices[f"hostile.{stored}"])
    is_finite = exact.isfinite().all(1)
    found = outputs(ops, checkpoint, f"hostile.{stored}", torch.randn(3, SHAPE[1]).bfloat16())
    assert torch.equal(found.isfinite().all(0), is_finite) and bool((~is_finite).any())


@of_each_level
@of_each_format
def test_a_head_is_read_as_the_floats_rounded_to_bfloat16(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint, matrices: dict[str, np.ndarray]
) -> None:
    for name in (f"tame.{stored}", f"hostile.{stored}"):
        exact = floats_of(stored, matrices[name])
        is_normal = exact.isfinite().all(1) & ((exact == 0) | (exact.abs() > 1e-37)).all(1)  # AVX512-BF16 has no others
        for shard in (range(SHAPE[0]), range(11, SHAPE[0] + 3)):  # ends in padding
            rows = checkpoint.load_rows(TensorSlice(name, SHAPE, 0, shard))
            assert rows is not None
            packed = ops.pack_linear(rows, None)
            ids = torch.tensor([*shard, SHAPE[0] + 9])
            found = ops.embedding(ids, packed, shard.start)
            real = range(shard.start, SHAPE[0])
            assert torch.equal(found[: len(real)][is_normal[real]], exact[real][is_normal[real]].bfloat16())
            assert torch.equal(found[: len(real)].isfinite(), exact[real].isfinite())
            assert not found[len(real) :].any() and bool(is_normal.any())


@of_each_level
@of_each_format
def test_a_row_has_the_same_bits_in_any_batch_and_team(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint, num_threads: Callable[[int], None]
) -> None:
    x = torch.randn(max(ROWS), SHAPE[1]).bfloat16()
    together = outputs(ops, checkpoint, f"tame.{stored}", x)
    for count in ROWS:
        assert torch.equal(outputs(ops, checkpoint, f"tame.{stored}", x[-count:]), together[-count:])
    num_threads(3 - min(torch.get_num_threads(), 2))
    assert torch.equal(outputs(ops, checkpoint, f"tame.{stored}", x), together)


@pytest.mark.skipif(not LEVELS, reason="the processor has no AVX2")
@of_each_format
def test_all_levels_give_the_same_bits(stored: str, checkpoint: GgufCheckpoint) -> None:
    torch.manual_seed(1)
    x = torch.randn(9, SHAPE[1]).bfloat16()
    made = [CpuOps(load_level(level, True).library, torch.bfloat16, has_integer_products=True) for level in LEVELS]
    found = [outputs(ops, checkpoint, f"tame.{stored}", x) for ops in made]
    assert all(torch.equal(each, found[0]) for each in found) and found[0].std() > 0


def held_in_tiles(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    """Return operations with products of floats, which keep codes if they have AMX."""
    ops = CpuOps(library, kind[0])
    assert ops.packs_blocks == (kind[1] in ("AMX", EMULATED_AMX)) and not ops.has_integer_products
    return ops


@of_each_level
@of_each_format
def test_products_of_floats_have_the_same_bits_from_codes(
    stored: str, library: KernelLibrary, kind: tuple[torch.dtype, str], checkpoint: GgufCheckpoint
) -> None:
    ops = held_in_tiles(library, kind)
    for name in (f"tame.{stored}", f"hostile.{stored}"):
        rows = checkpoint.load_blocks(TensorSlice(name, SHAPE))
        assert rows is not None
        packed, plain = ops.pack_linear(rows, None), ops.pack_linear(checkpoint.load(TensorSlice(name, SHAPE)), None)
        assert (packed.nbytes < 0.6 * plain.nbytes) == ops.packs_blocks
        for count in (*ROWS, 130):  # one block of rows; several, so that codes become elements once
            x = torch.randn(count, SHAPE[1]).bfloat16()
            found, expected = ops.logits(x, packed), ops.logits(x, plain)
            assert torch.equal(found.isnan(), expected.isnan()) and bool(expected.isfinite().any())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@of_each_level
def test_codes_that_would_be_rounded_become_floats(
    library: KernelLibrary, kind: tuple[torch.dtype, str], tmp_path: Path
) -> None:
    ops = held_in_tiles(library, kind)
    kinds = ("IQ4_XS", "Q4_K", "Q6_K")
    write_matrices(tmp_path, {name: (name, SHAPE, random_bytes(name, SHAPE, 1)) for name in kinds})
    x = torch.randn(3, SHAPE[1]).bfloat16()
    with GgufCheckpoint(tmp_path, torch.bfloat16, torch.device("cpu")) as opened:
        opened.keeps_blocks = True
        for names, activation in ((("IQ4_XS",), None), (("Q4_K", "Q6_K"), GATED_SILU), (("Q4_K", "Q4_K"), GATED_SILU)):
            slices = [TensorSlice(name, SHAPE) for name in names]
            rows, floats = opened.load_blocks(*slices), opened.load(*slices)
            assert rows is not None
            options = () if activation is None else (activation,)
            packed, plain = ops.pack_linear(rows, None, *options), ops.pack_linear(floats, None, *options)
            is_kept = ops.packs_blocks and names == ("Q4_K", "Q4_K")
            assert (packed.nbytes < plain.nbytes) == is_kept, names
            assert torch.equal(ops.linear(x, packed), ops.linear(x, plain))
