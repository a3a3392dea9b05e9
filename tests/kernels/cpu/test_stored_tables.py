"""Embeddings in blocks have the rows of gguf-py, rounded once: per format, shard and level, alone and in a decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.kernels.contract import CacheGroup, LowRankPart, LowRankUpdate
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library import KernelLibrary
from tokenloom.kernels.cpu.stored_table import CpuTable
from tokenloom.kernels.stored_rows import BLOCK_KINDS, StoredRows
from tokenloom.tests.kernels.cpu.levels import kinds
from tokenloom.tests.support.gguf_files import FILE, random_bytes, write_matrices
from tokenloom.tests.support.random_decoders import Builder, Fields
from tokenloom.tests.workers.paged_run import make_metadata
from tokenloom.workers.weights.checkpoint import TensorSlice
from tokenloom.workers.weights.gguf_blocks import FLOATS
from tokenloom.workers.weights.gguf_checkpoint import GgufCheckpoint

SHAPE = (40, 768)
QUANTIZED = [kind for kind in BLOCK_KINDS if kind not in FLOATS]
IDS = (0, 39, 17, 17, 40, -1, 5, 41)  # the last token has id 39

pytestmark = pytest.mark.parametrize(
    "kind", [kind for kind in kinds() if kind[0] == torch.bfloat16], indirect=True, ids=str, scope="session"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tables")
    write_matrices(made, {kind: (kind, SHAPE, random_bytes(kind, SHAPE, 3)) for kind in BLOCK_KINDS})
    return made


@pytest.fixture
def ops(library: KernelLibrary, kind: tuple[torch.dtype, str]) -> CpuOps:
    return CpuOps(library, kind[0])


def expected_rows(stored: str) -> Tensor:
    """Return the rows of gguf-py as bfloat16."""
    data = random_bytes(stored, SHAPE, 3)
    return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[stored]))).bfloat16()


def rows_of(folder: Path, stored: str, shard: range | None = None) -> StoredRows:
    with GgufCheckpoint(folder, torch.bfloat16, torch.device("cpu")) as checkpoint:
        rows = checkpoint.load_rows(TensorSlice(stored, SHAPE, 0, shard))
    assert rows is not None
    return rows


@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_row_is_that_of_the_file_rounded_once(stored: str, ops: CpuOps, folder: Path) -> None:
    ids, exact = torch.tensor(IDS, dtype=torch.int32), expected_rows(stored)
    for shard in (range(40), range(16), range(32, 48), range(48, 64)):
        table = ops.pack_table(rows_of(folder, stored, shard))
        assert isinstance(table, CpuTable)
        size = random_bytes(stored, SHAPE, 3).nbytes * len(range(shard.start, min(shard.stop, 40))) // 40
        assert (table.in_features, table.out_features, table.nbytes) == (SHAPE[1], len(shard), size)
        real = [id if id in shard and id < len(exact) else -1 for id in IDS]
        expected = torch.cat([exact, torch.zeros(1, SHAPE[1]).bfloat16()])[real]
        assert torch.equal(ops.embedding(ids, table, shard.start), expected)


def test_the_file_may_change_once_the_table_is_made(ops: CpuOps, folder: Path, tmp_path: Path) -> None:
    write_matrices(tmp_path, {"Q4_K": ("Q4_K", SHAPE, random_bytes("Q4_K", SHAPE, 3))})
    table = ops.pack_table(rows_of(tmp_path, "Q4_K"))
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(0)
    ids = torch.arange(40)
    assert torch.equal(ops.embedding(ids, table, 0), expected_rows("Q4_K"))


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_a_table_of_floats_has_the_models_dtype(stored: str, ops: CpuOps, folder: Path) -> None:
    table = ops.pack_table(rows_of(folder, stored))
    assert isinstance(table, Tensor) and torch.equal(table, expected_rows(stored))


def test_adapters_add_to_rows_of_blocks(library: KernelLibrary, kind: tuple[torch.dtype, str], folder: Path) -> None:
    exact, ids, answers = expected_rows("Q6_K"), torch.tensor([3, 17, 39, 40]), []
    part = LowRankPart(0, torch.randn(4, SHAPE[0]).bfloat16(), torch.randn(SHAPE[1], 4).bfloat16())
    for stored in (True, False):
        ops = CpuOps(library, kind[0])
        space = ops.adapter_space(1, 4)
        table = ops.pack_table(rows_of(folder, "Q6_K")) if stored else exact
        space.attach_embedding(table, 0).fill(1, LowRankUpdate([part]))
        space.begin_step(torch.tensor([1, 0, 1, 1], dtype=torch.int32))
        answers.append(ops.embedding(ids, table, 0))
    assert torch.equal(*answers) and not torch.equal(answers[0][0], exact[3])


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_a_whole_decoder_reads_rows_of_blocks(scale: float, ops: CpuOps, folder: Path) -> None:
    fields, answers = Fields(hidden_size=SHAPE[1], embedding_scale=scale), []
    weights = Builder(fields, ops, ops.dtype).decoder()
    for table in (ops.pack_table(rows_of(folder, "Q5_K")), expected_rows("Q5_K")):
        decoder, metadata = ops.fuse_decoder(replace(weights, table=table)), make_metadata([(5, 5, [1])], 16)
        assert decoder is not None
        cache = torch.zeros((2, 2, 2, fields.num_kv_heads, 16, fields.head_dim), dtype=ops.dtype)
        hidden, logits = decoder(torch.tensor([0, 39, 17, 17, 40]), torch.tensor([4, 1]), [CacheGroup(cache, metadata)])
        answers.append((hidden.clone(), logits.clone(), cache))
    assert all(map(torch.equal, *answers)) and answers[0][0].isfinite().all()
