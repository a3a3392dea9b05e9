"""The batch's arrays match plain records of each row, and invalid changes raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.tests.workers.random_schedule import new_row
from tokenloom.workers.step.input_batch import InputBatch

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 6, 50, 4, 200
MAX_LORAS = 2
MAX_BLOCKS = -(-MAX_MODEL_LEN // BLOCK_SIZE)  # of a row


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def new_batch() -> InputBatch:
    return InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, [NUM_BLOCKS], max_loras=MAX_LORAS)


@dataclass
class Record:
    """The oracle: one row as plain lists."""

    tokens: list[int]
    num_computed: int
    adapter_slot: int = 0
    blocks: list[int] = field(default_factory=list)


def grow(batch: InputBatch, records: dict[int, Record], rng: np.random.Generator, ends: dict[int, int]) -> None:
    """Give each row the blocks that it needs for `ends[row]` tokens, interleaved between rows."""
    missing = {row: -(-end // BLOCK_SIZE) - len(records[row].blocks) for row, end in ends.items()}
    rows = rng.permutation([row for row, count in missing.items() for _ in range(count)]).tolist()
    appends = [(int(row), 0, int(rng.integers(1, NUM_BLOCKS))) for row in rows]
    for row, _, block in appends:
        records[row].blocks.append(block)
    batch.append_blocks(np.array(appends, np.int32).reshape(-1, 3))


def check_step(batch: InputBatch, records: dict[int, Record], rows: list[int], counts: list[int]) -> list[int]:
    """Compare one step with the records; returns the rows that sample."""
    inputs = batch.prepare(batch.layout(ints(*rows).tobytes(), ints(*counts).tobytes()))
    pairs = list(zip(rows, counts, strict=True))
    ordered = [pair for pair in pairs if pair[1] == 1] + [pair for pair in pairs if pair[1] != 1]
    assert inputs.num_decode_rows == sum(count == 1 for count in counts)
    assert inputs.query_starts.tolist() == np.cumsum([0, *(count for _, count in ordered)]).tolist()
    spans = [(records[row], range(records[row].num_computed, records[row].num_computed + n)) for row, n in ordered]
    assert inputs.token_ids.tolist() == [record.tokens[p] for record, span in spans for p in span]
    assert inputs.positions.tolist() == [p for _, span in spans for p in span]
    assert inputs.groups[0].slots.tolist() == [
        record.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for record, span in spans for p in span
    ]
    adapter_slots = [record.adapter_slot for record, span in spans for _ in span]
    assert (inputs.token_slots is None) == (not any(adapter_slots))
    assert inputs.token_slots is None or inputs.token_slots.tolist() == adapter_slots
    for slot in range(1, MAX_LORAS + 1):
        of_slot = [row for row, record in sorted(records.items()) if record.adapter_slot == slot]
        assert batch.rows_of_adapter(slot).tolist() == of_slot
    assert inputs.seq_lens.tolist() == [span.stop for _, span in spans]
    width = max(-(-span.stop // BLOCK_SIZE) for _, span in spans)
    padded = [(record.blocks + [0] * width)[:width] for record, _ in spans]
    assert inputs.groups[0].block_tables.tolist() == padded
    sampling = [row for row, n in pairs if records[row].num_computed + n == len(records[row].tokens)]
    assert inputs.sampled_rows.tolist() == sampling
    assert inputs.sampled_positions.tolist() == [len(records[row].tokens) for row in sampling]
    last_token = {row: int(end) - 1 for (row, _), end in zip(ordered, inputs.query_starts[1:], strict=True)}
    assert inputs.sampled_tokens.tolist() == [last_token[row] for row in sampling]
    return sampling


@pytest.mark.parametrize("seed", range(8))
def test_random_admissions_steps_and_frees_match_plain_records(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, records = new_batch(), dict[int, Record]()
    for _ in range(120):
        finished = [row for row in records if len(records[row].tokens) >= MAX_MODEL_LEN or rng.random() < 0.03]
        batch.free(ints(*finished))
        for row in finished:
            del records[row]
        for row in set(range(MAX_NUM_SEQS)) - set(records):
            if rng.random() < 0.4:
                tokens = rng.integers(0, 1000, rng.integers(1, 30)).tolist()
                slot = int(rng.integers(0, MAX_LORAS + 1)) if rng.random() < 0.3 else 0
                record = Record(tokens, int(rng.integers(0, len(tokens))), slot)
                batch.admit(replace(new_row(row, tokens, record.num_computed), adapter_slot=slot))
                records[row] = record
        rows = [int(row) for row in rng.permutation(sorted(records)) if rng.random() < 0.8]
        if not rows:
            continue
        counts = [int(rng.integers(1, len(records[r].tokens) - records[r].num_computed + 1)) for r in rows]
        if rng.random() < 0.7:  # often the same rows as before, one token each
            rows = sorted(records)
            counts = [1] * len(rows)
        ends = {row: records[row].num_computed + count for row, count in zip(rows, counts, strict=True)}
        grow(batch, records, rng, ends)
        sampling = check_step(batch, records, rows, counts)
        batch.advance(batch.layout(ints(*rows).tobytes(), ints(*counts).tobytes()))
        sampled = rng.integers(0, 1000, len(sampling))
        if rng.random() < 0.5:
            batch.append_tokens(ints(*sampling), sampled)
        else:  # a device samples them
            expected = batch.expect_tokens(ints(*sampling))
            assert [batch.token_ids(row)[-1] for row in sampling] == [-1 - row for row in sampling]
            batch.fill_tokens(expected, sampled)
        for row in rows:
            records[row].num_computed = ends[row]
        for row, token in zip(sampling, sampled.tolist(), strict=True):
            records[row].tokens.append(token)
        forced = {row: [7, 8, 9] for row in sampling if len(records[row].tokens) < 40 and rng.random() < 0.1}
        batch.append_forced(ints(*(value for row, ids in forced.items() for value in (row, len(ids), *ids))))
        for row, ids in forced.items():
            records[row].tokens += ids
        assert batch.num_active == len(records)
        assert all(batch.token_ids(row) == record.tokens for row, record in records.items())


def test_cached_step_state_is_dropped_when_its_row_is_freed() -> None:
    batch, rows = new_batch(), ints(2)
    for temperature, num_spans, forget in ((0.5, 1, batch.clear), (0.7, 0, None), (0.9, 1, None), (0.3, 0, None)):
        sampling = RowSampling(temperature=temperature, num_prompt_logprobs=num_spans - 1)
        batch.admit(new_row(2, [1, 2], sampling=sampling))
        batch.append_blocks(np.array([[2, 0, 1]], np.int32))
        layout = batch.layout(rows.tobytes(), ints(2).tobytes())
        assert batch.prepare(layout).sampled_rows.tolist() == [2] and len(batch.prompt_spans(layout)) == num_spans
        assert batch.sampling_metadata(rows).sampling.temperature.tolist() == [np.float32(temperature)]
        forget() if forget is not None else batch.free(rows)
        with pytest.raises(ProtocolError, match="not in use"):
            batch.layout(rows.tobytes(), ints(1).tobytes())


def started() -> InputBatch:
    """Rows 0 and 1 with 6 tokens, 2 blocks (8 slots) and 1 block (4 slots)."""
    batch = new_batch()
    batch.admit(new_row(0, list(range(6))))
    batch.admit(new_row(1, list(range(6))))
    batch.append_blocks(np.array([[0, 0, 1], [0, 0, 2], [1, 0, 3]], np.int32))
    return batch


def step(batch: InputBatch, rows: list[int], counts: list[int]) -> None:
    batch.prepare(batch.layout(ints(*rows).tobytes(), ints(*counts).tobytes()))


def append(batch: InputBatch, *blocks: list[int]) -> None:
    batch.append_blocks(np.array(blocks, np.int32))


def force(batch: InputBatch, *appends: int) -> None:
    batch.append_forced(ints(*appends))


@pytest.mark.parametrize(
    ("change", "arguments", "reason"),
    [
        (step, ([0], [7]), "known tokens"),
        (step, ([1], [5]), "slots"),
        (step, ([0, 0], [1, 1]), "each once"),
        (step, ([0, 1], [1]), "counts"),
        (step, ([0], [0]), "at least 1"),
        (step, ([2], [1]), "not in use"),
        (step, ([-1], [1]), "rows are"),
        (step, ([6], [1]), "rows are"),
        (append, ([0, 0, 0],), "blocks are"),
        (append, ([0, 0, NUM_BLOCKS],), "blocks are"),
        (append, ([0, 1, 5],), "group"),
        (append, ([3, 0, 5],), "not in use"),
        (append, ([9, 0, 5],), "rows are"),
        (append, [[0, 0, 9]] * (MAX_BLOCKS - 1), f"at most {MAX_BLOCKS}"),
        (force, (0,), "of which there are 0"),
        (force, (0, 2, 5), "given 2 tokens, of which there are 1"),
        (force, (0, 0), "given 0 tokens"),
        (force, (0, -1, 5), "given -1 tokens"),
        (force, (3, 1, 5), "not in use"),
        (force, (9, 1, 5), "rows are"),
        (force, (0, MAX_MODEL_LEN, *range(MAX_MODEL_LEN)), "already"),
        (InputBatch.admit, (new_row(0, [1]),), "not freed"),
        (InputBatch.admit, (new_row(-1, [1]),), "rows are"),
        (InputBatch.admit, (new_row(MAX_NUM_SEQS, [1]),), "rows are"),
        (InputBatch.admit, (new_row(2, []),), "one to compute"),
        (InputBatch.admit, (new_row(2, [1, 2], computed=2),), "one to compute"),
        (InputBatch.admit, (new_row(2, [1] * (MAX_MODEL_LEN + 1)),), "at most 50"),
        (InputBatch.admit, (replace(new_row(2, [1]), adapter_slot=MAX_LORAS + 1),), r"slot 3, slots are \[1, 2\]"),
        (InputBatch.admit, (replace(new_row(2, [1]), adapter_slot=-1),), "adapter slot -1"),
        (InputBatch.free, (ints(3),), "not in use"),
    ],
)
def test_a_change_that_contradicts_the_rows_is_refused(
    change: Callable[..., None], arguments: Sequence[Any], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        change(started(), *arguments)
