"""Rows of GGUF files are packed from their blocks: with the bits that plain torch gives, where it makes the same codes;
in any shard, order and layer; by any team."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.spec.config.gguf_index import BLOCKS, EXACT_KINDS, KEPT_BITS
from tokenloom.kernels.contract import GATED_SILU, NO_ACTIVATION, Activation
from tokenloom.kernels.cpu import library as c
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.cpu.linear_packer import CpuLinear
from tokenloom.kernels.quantized import Weight, quantize
from tokenloom.kernels.stored_rows import BLOCK_KINDS, INT8, StoredRows
from tokenloom.tests.kernels.cpu.levels import kinds
from tokenloom.tests.support.gguf_files import hostile_bytes, random_bytes, write_matrices
from tokenloom.workers.weights.checkpoint import TensorSlice
from tokenloom.workers.weights.gguf_blocks import FLOATS
from tokenloom.workers.weights.gguf_checkpoint import BLOCK_FORMS, FORMS, GgufCheckpoint

SHAPE = (70, 2816)  # 88 lines of a row: a chunk of 8 at a time, and no multiple of a pair of tiles
SMALL = (40, 160)  # with formats of 32 inputs: 5 lines
NARROW = (33, 32)  # one line, so that a row has one scale
WIDTHS = {"F32": 50, "F16": 50, "BF16": 50}  # inputs of a table of floats: no whole line
QUANTIZED = [kind for kind in BLOCK_KINDS if kind not in FLOATS]
MIXED = [("Q4_K", "Q6_K", "Q4_1"), ("Q8_0", "Q4_0")]
KINDS = [kind for kind in kinds() if kind[0] == torch.bfloat16]

pytestmark = pytest.mark.parametrize("kind", KINDS, indirect=True, ids=str, scope="session")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, matrices = tmp_path_factory.mktemp("blocks"), {}
    for seed, kind in enumerate(BLOCK_KINDS):
        size = BLOCKS[kind][0]
        shape = (SHAPE[0], WIDTHS.get(kind, SHAPE[1]))
        matrices[f"tame.{kind}"] = (kind, shape, random_bytes(kind, shape, seed))
        matrices[f"hostile.{kind}"] = (kind, shape, hostile_bytes(kind, shape, seed))
        if size == 32:
            matrices[f"small.{kind}"] = (kind, SMALL, random_bytes(kind, SMALL, seed))
            matrices[f"narrow.{kind}"] = (kind, NARROW, random_bytes(kind, NARROW, seed))
    write_matrices(made, matrices)
    return made


@pytest.fixture
def checkpoint(folder: Path) -> Iterator[GgufCheckpoint]:
    with GgufCheckpoint(folder, torch.bfloat16, torch.device("cpu")) as opened:
        opened.keeps_blocks = True
        yield opened


@pytest.fixture(scope="module")
def ops(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    return CpuOps(library, kind[0], has_integer_products=True)


def whole(checkpoint: GgufCheckpoint, name: str) -> TensorSlice:
    return TensorSlice(name, checkpoint.shape_of(name))


def packed_bits(ops: CpuOps, weight: Weight | None, activation: Activation = NO_ACTIVATION) -> list[np.ndarray]:
    """Pack a weight and return, for each part, its codes, scales, zeros and mins, and at last the biases. Codes with a
    scale that is not finite become 0, as they stand for no number, and all NaNs are alike."""
    assert weight is not None
    bias = torch.arange(weight.shape[0]).to(ops.dtype)
    packed = ops.pack_linear(weight, bias, activation)
    assert isinstance(packed, CpuLinear)
    linear = packed.struct
    parts = (c.Codes * linear.num_parts).from_address(linear.parts)
    ends = [*(part.first_pair for part in parts[1:]), linear.num_pairs]
    found = [
        each
        for part, end in zip(parts, ends, strict=True)
        for each in bits_of_part(part, end - part.first_pair, linear.num_lines)
    ]
    return [*found, array_at(linear.bias, np.float32, (linear.num_pairs, 32))]


def bits_of_part(codes: ctypes.Structure, num_pairs: int, num_lines: int) -> list[np.ndarray]:
    shape = (num_pairs, num_lines, 8 * codes.num_bits // 8, 32, 4)
    tiles = array_at(codes.codes, np.uint8, shape).copy()
    groups = (num_pairs, codes.num_groups, 32)
    multiples = (num_pairs, 2 * num_lines, 32)
    present = [
        array_at(address, dtype, multiples if address == codes.multiples else groups)
        for address, dtype in (
            (codes.scales, np.float32),
            (codes.halves, np.float16),
            (codes.mins, np.float16),
            (codes.zeros, np.uint8),
            (codes.multiples, np.uint8),
        )
        if address
    ]
    if codes.num_bits == 8:
        is_broken = ~np.isfinite(present[0]).repeat(num_lines // codes.num_groups, 1)
        tiles[np.broadcast_to(is_broken[:, :, None, :, None], shape)] = 0
    return [tiles, *(np.nan_to_num(each, nan=-1, posinf=-2, neginf=-3) for each in present)]


def array_at(address: int, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype).reshape(shape)


def check(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("stored", [kind for kind in QUANTIZED if BLOCK_FORMS.get(kind) == FORMS.get(kind, INT8)])
def test_blocks_become_the_codes_of_plain_torch(stored: str, ops: CpuOps, checkpoint: GgufCheckpoint) -> None:
    names = [name for name in ("tame", "hostile", "small", "narrow") if f"{name}.{stored}" in checkpoint]
    for name in names:
        wanted = whole(checkpoint, f"{name}.{stored}")
        check(packed_bits(ops, checkpoint.load_blocks(wanted)), packed_bits(ops, checkpoint.load_codes(wanted)))


@pytest.mark.parametrize("stored", QUANTIZED)
def test_packed_weights_take_the_bits_that_estimates_count(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint
) -> None:
    rows = checkpoint.load_blocks(TensorSlice(f"tame.{stored}", SHAPE, 0, range(64)))
    assert rows is not None
    assert ops.pack_linear(rows, None).nbytes * 8 == KEPT_BITS[stored] * 64 * SHAPE[1]


@pytest.mark.parametrize("stored", [kind for kind in BLOCK_KINDS if kind not in EXACT_KINDS])
def test_a_head_has_one_scale_for_each_row_as_in_plain_torch(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint
) -> None:
    for name in ("tame", "hostile"):
        shape = checkpoint.shape_of(f"{name}.{stored}")
        for shard in (range(shape[0]), range(shape[0] - 30, shape[0] + 3)):  # ends in padding
            wanted = TensorSlice(f"{name}.{stored}", shape, 0, shard)
            expected = quantize(checkpoint.load(wanted), "int8")
            check(packed_bits(ops, checkpoint.load_rows(wanted)), packed_bits(ops, expected))


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_K", "Q5_0", "Q6_K"])
def test_shards_and_orders_of_rows_are_those_of_the_whole_matrix(
    stored: str, ops: CpuOps, checkpoint: GgufCheckpoint
) -> None:
    name, x = f"tame.{stored}", torch.randn(3, SHAPE[1]).bfloat16()

    def outputs(weight: Weight | None, inputs: Tensor) -> Tensor:
        assert weight is not None
        return ops.logits(inputs, ops.pack_linear(weight, None))

    rows = checkpoint.load_blocks(whole(checkpoint, name))
    assert rows is not None
    every, order = outputs(rows, x), torch.randperm(SHAPE[0])
    assert torch.equal(outputs(rows.select_outputs(order), x), every[:, order])
    shard = checkpoint.load_blocks(TensorSlice(name, SHAPE, 0, range(11, 60)))
    assert torch.equal(outputs(shard, x), every[:, 11:60])
    columns, others = x.clone(), checkpoint.load_blocks(TensorSlice(name, SHAPE, 1, range(256, 1280)))
    columns[:, :256] = columns[:, 1280:] = 0
    assert torch.equal(outputs(others, x[:, 256:1280].contiguous()), outputs(rows, columns))


@pytest.mark.parametrize("parts", MIXED, ids="-".join)
def test_matrices_of_a_layer_keep_their_forms_but_where_they_share_tiles(
    parts: tuple[str, ...], ops: CpuOps, checkpoint: GgufCheckpoint
) -> None:
    slices = [whole(checkpoint, f"tame.{each}") for each in parts]
    rows, in_8_bits = checkpoint.load_blocks(*slices), checkpoint.load_codes(*slices)
    assert rows is not None and in_8_bits is not None and not in_8_bits.is_packed
    x = torch.randn(3, SHAPE[1]).bfloat16()

    def outputs(weight: Weight | None) -> Tensor:
        assert weight is not None
        return ops.logits(x, ops.pack_linear(weight, None))

    alone, joint = torch.cat([outputs(checkpoint.load_blocks(each)) for each in slices], dim=1), outputs(in_8_bits)
    matrices = torch.arange(len(parts)).repeat_interleave(SHAPE[0])
    in_order = torch.arange(len(matrices))
    for order in (in_order, torch.randperm(len(matrices)), in_order.flip(0)):
        is_alike = torch.cat([pair.eq(pair[0]).all().expand(len(pair)) for pair in matrices[order].split(32)])
        expected = alone[:, order].where(is_alike, joint[:, order])
        assert torch.equal(outputs(rows.select_outputs(order)), expected)


def test_gates_and_ups_of_different_forms_meet_in_8_bits(ops: CpuOps, checkpoint: GgufCheckpoint) -> None:
    for parts in (("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")):
        slices = [whole(checkpoint, f"tame.{each}") for each in parts]
        found, expected = checkpoint.load_blocks(*slices), checkpoint.load_codes(*slices)
        check(packed_bits(ops, found, GATED_SILU), packed_bits(ops, expected, GATED_SILU))


def test_any_team_packs_the_same_bits(
    ops: CpuOps, checkpoint: GgufCheckpoint, num_threads: Callable[[int], None]
) -> None:
    for name in ("tame.Q4_K", "tame.Q5_K", "tame.Q6_K", "tame.IQ4_XS"):
        wanted, found = whole(checkpoint, name), list[list[np.ndarray]]()
        for count in (1, 2, 3):
            num_threads(count)
            found.append(packed_bits(ops, checkpoint.load_blocks(wanted)))
            found[-1] += packed_bits(ops, checkpoint.load_rows(wanted))
        check(found[1], found[0])
        check(found[2], found[0])


def test_rows_are_floats_where_codes_cannot_be_multiplied(
    library: KernelLibrary, kind: tuple[torch.dtype, str], checkpoint: GgufCheckpoint
) -> None:
    rows = checkpoint.load_blocks(whole(checkpoint, "tame.Q4_K"))
    assert isinstance(rows, StoredRows)
    exact, x = checkpoint.load(whole(checkpoint, "tame.Q4_K")), torch.randn(3, SHAPE[1]).to(kind[0])
    plain: list[Tensor] = []
    for weight in (rows, exact):
        ops = CpuOps(library, kind[0])
        plain.append(ops.linear(x, ops.pack_linear(weight, None)))
    assert torch.equal(*plain)
