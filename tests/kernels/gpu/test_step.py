"""The first launch of a step against the reference, over random rows, in the interpreter, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tokenloom.kernels.contract import AttentionMetadata, BatchColumns
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.today import some

NUM_ROWS = 12
BOTH = (TritonOps(90), ReferenceOps())


def random_table(rng: random.Random) -> tuple[torch.Tensor, int]:
    """Make a rank's part of an embedding table; return it with its first id."""
    num_ids, width = rng.choice([1, 11, 300]), rng.choice([1, 40, 1024, 1100])
    return torch.randn(num_ids, width).to(rng.choice([torch.float32, torch.float16])), rng.choice([0, 1, 50])


def random_columns(
    rng: random.Random, num_ids: int, first_id: int, max_num_tokens: int, width: int, num_groups: int = 1
) -> BatchColumns:
    """Make rows with num_computed around block limits, and last tokens partly outside the rank's table."""
    edges = [0, 1, 15, 16, 17, max_num_tokens - 1]
    computed = [rng.choice([*edges, rng.randrange(max_num_tokens)]) for _ in range(NUM_ROWS)]
    return BatchColumns(
        last_tokens=torch.randint(0, first_id + 2 * num_ids, (NUM_ROWS,)),
        num_computed=torch.tensor(computed, dtype=torch.int32).clamp(max=max_num_tokens - 1),
        block_tables=torch.randint(1, 1 << 30, (num_groups, NUM_ROWS, width), dtype=torch.int32),
        rope_deltas=torch.randint(-5, 5, (NUM_ROWS,), dtype=torch.int32) if rng.random() < 0.5 else None,
    )


def unwritten(num_rows: int, width: int) -> AttentionMetadata:
    """Make the metadata of a step with its tensors still to be filled."""
    return AttentionMetadata(
        positions=torch.full((num_rows,), -7),
        slots=torch.full((num_rows,), -7),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.full((num_rows,), -7, dtype=torch.int32),
        block_tables=torch.full((num_rows, width), -7, dtype=torch.int32),
        num_decode_rows=num_rows,
        query_starts_host=list(range(num_rows + 1)),
        seq_lens_host=[1] * num_rows,
    )


def unwritten_groups(num_groups: int, num_rows: int, width: int) -> list[AttentionMetadata]:
    first, *others = [unwritten(num_rows, width) for _ in range(num_groups)]
    return [first, *(replace(each, positions=first.positions, seq_lens=first.seq_lens) for each in others)]


def copy(columns: BatchColumns) -> BatchColumns:
    clones = columns.last_tokens.clone(), columns.num_computed.clone(), columns.block_tables.clone()
    return BatchColumns(*clones, rope_deltas=columns.rope_deltas)


@pytest.mark.parametrize("seed", some(range(60), 12))
def test_begin_decode_is_the_references(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    table, first_id = random_table(rng)
    block_size, width = rng.choice([4, 16, 128]), rng.choice([1, 3, 300])
    num_groups = rng.choice([1, 1, 3])
    columns = random_columns(rng, len(table), first_id, block_size * width, width, num_groups)
    row_ids = torch.tensor(rng.sample(range(NUM_ROWS), rng.choice([0, 1, 1, 5, NUM_ROWS])) + [-1] * rng.choice([0, 3]))
    results = []
    for ops in BOTH:
        rows, groups = copy(columns), unwritten_groups(num_groups, len(row_ids), width)
        embedded = ops.begin_decode(row_ids.long(), rows, groups, block_size, table, first_id)
        results.append((embedded, rows, groups))
    (embedded, rows, groups), (wanted, wanted_rows, wanted_groups) = results
    assert torch.equal(embedded, wanted)
    for name in ("last_tokens", "num_computed", "block_tables"):
        assert torch.equal(getattr(rows, name), getattr(wanted_rows, name))
    for metadata, wanted_metadata in zip(groups, wanted_groups, strict=True):
        for name in ("positions", "slots", "seq_lens"):
            assert torch.equal(getattr(metadata, name), getattr(wanted_metadata, name))
        for i, length in enumerate(metadata.seq_lens.tolist()):
            num_blocks = -(-length // block_size)
            assert torch.equal(metadata.block_tables[i, :num_blocks], wanted_metadata.block_tables[i, :num_blocks])


def test_begin_decode_fills_positions_slots_and_tables() -> None:
    """Blocks of 4; row 2 has computed 5 tokens and a delta of −2, row 0 none and 4; the row between is padding."""
    table = torch.arange(10.0)[:, None]
    tables = torch.tensor([[[7, 0, 0], [0, 0, 0], [9, 3, 0]]], dtype=torch.int32)
    for ops in BOTH:
        deltas = torch.tensor([4, 1, -2], dtype=torch.int32)
        rows = BatchColumns(torch.tensor([8, 1, 6]), torch.tensor([0, 2, 5], dtype=torch.int32), tables, None, deltas)
        metadata = unwritten(3, 3)
        embedded = ops.begin_decode(torch.tensor([2, -1, 0]), rows, [metadata], 4, table, 0)
        assert embedded.flatten().tolist() == [6, 0, 8]
        assert metadata.positions.tolist() == [3, 0, 4]
        assert metadata.slots.tolist() == [3 * 4 + 1, -1, 7 * 4]
        assert metadata.seq_lens.tolist() == [6, 0, 1]
        assert metadata.block_tables[0, :2].tolist() == [9, 3] and metadata.block_tables[2, 0] == 7
        assert rows.num_computed.tolist() == [1, 2, 6]


@pytest.mark.parametrize("seed", some(range(30), 6))
def test_begin_step_embeds_last_tokens_like_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    table, first_id = random_table(rng)
    columns = random_columns(rng, len(table), first_id, 16, 1)
    token_ids = torch.randint(-NUM_ROWS, first_id + 2 * len(table), (rng.choice([0, 1, 9]),), dtype=torch.int32)
    embedded, wanted = (ops.begin_step(token_ids, columns, table, first_id) for ops in BOTH)
    assert torch.equal(embedded, wanted)
    known = [int(columns.last_tokens[-1 - token]) if token < 0 else token for token in token_ids.tolist()]
    assert torch.equal(embedded, ReferenceOps().embedding(torch.tensor(known, dtype=torch.int64), table, first_id))
