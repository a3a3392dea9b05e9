"""Reads and prefetches of weights, keys and values: by counts, as times on a shared machine vary."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tokenloom.kernels.contract import Routing
from tokenloom.kernels.cpu.cpu_experts import CpuExperts
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.cpu.linear_packer import CpuLinear
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.tests.kernels.cpu.compile_with_header import compile_with_header
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import load
from tokenloom.workers.step.model_step import compute
from tokenloom.workers.step.profile import dummy_step

LEVELS = [level for level in instruction_levels() if level.startswith("AVX")]
NUM_INPUTS, NUM_OUTPUTS = 1024, 96  # 64 KiB for each of three pairs of tiles
NUM_LINES = NUM_INPUTS * NUM_OUTPUTS * 2 // 64
FETCHED_AHEAD = 8192 // 64  # lines


class CountedReads(ctypes.Structure):
    """As in counted_reads.h."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("num_loads", ctypes.c_int64),
        ("num_jumps", ctypes.c_int64),
        ("num_fetches", ctypes.c_void_p),
    )


class Reads(NamedTuple):
    """Lines of a weight, or of a part of the KV cache, that were read."""

    num_loads: int
    num_jumps: int
    num_fetches: list[int]  # of each line


@pytest.fixture(scope="module", params=some(LEVELS, 1))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def counted(level: str, tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    return compile_with_header("counted_reads.h", level, tmp_path_factory.mktemp("counted") / "sources")


@pytest.fixture(autouse=True)
def one_thread(num_threads: Callable[[int], None]) -> None:
    num_threads(1)


def multiply(library: KernelLibrary, num_rows: int) -> Reads:
    ops = CpuOps(library, torch.bfloat16)
    weight = ops.pack_linear(torch.randn(NUM_OUTPUTS, NUM_INPUTS, dtype=torch.bfloat16), None)
    assert isinstance(weight, CpuLinear)
    x = torch.randn(num_rows, NUM_INPUTS, dtype=torch.bfloat16)
    return count_reads(library, weight.struct.weight, NUM_LINES, lambda: ops.linear(x, weight))


def count_reads(library: KernelLibrary, start: int, num_lines: int, function: Callable[[], object]) -> Reads:
    num_fetches = torch.zeros(num_lines, dtype=torch.uint8)
    counted = CountedReads.in_dll(library, "counted_reads")
    counted.next, counted.num_loads, counted.num_jumps, counted.num_fetches = start, 0, 0, num_fetches.data_ptr()
    counted.start, counted.stop = start, start + num_lines * 64
    function()
    counted.stop = counted.start
    return Reads(counted.num_loads, counted.num_jumps, num_fetches.tolist())


@pytest.mark.parametrize("num_rows", some([8, 9, 12, 13, 16, 17, 24, 32], 3))
def test_a_weight_is_prefetched_while_rows_are_multiplied(counted: KernelLibrary, num_rows: int) -> None:
    assert sum(map(bool, multiply(counted, num_rows).num_fetches)) >= NUM_LINES - FETCHED_AHEAD


@pytest.mark.parametrize("window", [None, 20])
def test_products_of_32_rows_prefetch_the_keys_and_values_of_the_next_layer(
    tmp_path: Path, level: str, counted: KernelLibrary, window: int | None
) -> None:
    """Attention prefetches each key and value, a line here, once; with AVX2 nothing else does."""
    folder = tiny_checkpoint(tmp_path, "mistral", sliding_window=window, head_dim=32)
    model = load(folder, torch.bfloat16, ops=CpuOps(counted, torch.bfloat16))
    inputs = dummy_step([1] * 32, [48] * 32, 16)
    inputs = inputs._replace(
        groups=[inputs.groups[0]._replace(block_tables=np.arange(1, 97, dtype=np.int32).reshape(32, 3))]
    )
    kv_cache = model.kv_cache_specs(16, torch.bfloat16)[0].allocate(97, torch.device("cpu"))

    def fetches(block: int) -> set[int]:
        """Return how often lines of the block were prefetched, in the last layer."""
        part = kv_cache[block, -1]
        reads = count_reads(counted, part.data_ptr(), part.nbytes // 64, lambda: compute(model, inputs, [kv_cache]))
        return set(reads.num_fetches)

    last, first = fetches(3), fetches(1)
    assert last == {1 if level == "AVX2" else 2} and first == ({0} if window else last)


@pytest.mark.parametrize(
    ("num_rows", "num_passes"), [(1, 1), (3, 1), (5, 1), (7, 1), (8, 1), (12, 1), (13, 2), (16, 2), (24, 3), (32, 4)]
)
def test_up_to_12_rows_share_a_pass_over_a_weight_in_the_order_of_memory(
    counted: KernelLibrary, num_rows: int, num_passes: int
) -> None:
    """More passes go over 8 KiB at a time."""
    reads = multiply(counted, num_rows)
    if reads.num_loads:  # AVX2 reads weights with instructions that are not counted
        jumps = (num_passes - 1) * NUM_LINES // FETCHED_AHEAD  # back to the start of each 8 KiB
        assert (reads.num_loads, reads.num_jumps) == (num_passes * NUM_LINES, jumps)


@pytest.mark.parametrize("num_tokens", [1, 6, 24])
def test_a_step_reads_the_weights_of_chosen_experts_once_in_the_order_of_memory(
    counted: KernelLibrary, num_tokens: int
) -> None:
    """Each of the 6 experts that are chosen, by turns, has at most 12 tokens."""
    ops, num_experts, inner = CpuOps(counted, torch.bfloat16), 8, 64
    gate_up = [torch.randn(2 * inner, NUM_INPUTS, dtype=torch.bfloat16) for _ in range(num_experts)]
    experts = ops.pack_experts(gate_up, [torch.randn(NUM_INPUTS, inner, dtype=torch.bfloat16)] * num_experts)
    assert isinstance(experts, CpuExperts)
    scores = torch.zeros(num_tokens, num_experts)
    chosen = {(token + rank) % 6 for token in range(num_tokens) for rank in range(2)}
    for token in range(num_tokens):
        scores[token, token % 6], scores[token, (token + 1) % 6] = 2, 1
    x = torch.randn(num_tokens, NUM_INPUTS, dtype=torch.bfloat16)
    num_lines = 2 * inner * NUM_INPUTS * 2 // 64  # of an expert's first matrix
    start = experts.up[0].weight
    reads = count_reads(counted, start, num_experts * num_lines, lambda: ops.fused_moe(x, scores, experts, Routing(2)))
    if reads.num_loads:
        assert (reads.num_loads, reads.num_jumps) == (len(chosen) * num_lines, 0)
