"""A batch's status moves along the table alone, and everything random of it comes from its nonce."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest

from tokenloom.frontend.forms.openai.batches.batch import Batch, BatchError, Status
from tokenloom.frontend.state.batches.record import MAX_FAULTS, MOVES, BatchRecord, IllegalMove


def new_record(batch_id: str = "batch_1", nonce: bytes = b"n" * 16, input_file_id: str = "file-1") -> BatchRecord:
    batch = Batch(
        id=batch_id,
        endpoint="/v1/completions",
        input_file_id=input_file_id,
        completion_window="24h",
        created_at=1000,
        expires_at=1000 + 24 * 3600,
    )
    return BatchRecord(batch=batch, nonce=nonce, served_model="m", expires_at=1000.0 + 24 * 3600)


@pytest.mark.parametrize("seed", range(20))
def test_a_status_changes_by_legal_moves_alone_and_an_illegal_one_changes_nothing(seed: int) -> None:
    rng, record = random.Random(seed), new_record()
    statuses: list[Status] = list(MOVES)
    for now in range(1, 40):
        before, wanted = msgspec.json.encode(record), rng.choice(statuses)
        if wanted in MOVES[record.batch.status]:
            record.move(wanted, now)
            assert record.batch.status == wanted and getattr(record.batch, f"{wanted}_at") == now
        else:
            with pytest.raises(IllegalMove):
                record.move(wanted, now)
            assert msgspec.json.encode(record) == before
        assert record.is_open == (record.batch.status not in ("failed", "completed", "expired", "cancelled"))


def test_every_status_leads_to_an_end_and_each_end_is_final() -> None:
    assert set(MOVES) == set(get_args(Status))
    for status in MOVES:
        seen, left = {status}, [status]
        while left:
            left += [each for each in MOVES[left.pop()] if each not in seen]
            seen.update(left)
        assert any(not MOVES[each] for each in seen)


def test_nonces_seeds_and_ids_of_lines_depend_on_batch_and_line_alone() -> None:
    record, other = new_record(), new_record(nonce=b"o" * 16)
    for draw in (BatchRecord.nonce_of, BatchRecord.seed_of, BatchRecord.line_id):
        drawn = [draw(each, number) for each in (record, other) for number in range(100)]
        assert len(set(drawn)) == 200 and draw(new_record(), 7) == draw(record, 7)


def test_only_the_first_faults_of_a_file_are_kept() -> None:
    record = new_record()
    for number in range(MAX_FAULTS + 5):
        record.add_fault(BatchError("code", "message", None, number))
    assert record.batch.errors is not None
    assert [each.line for each in record.batch.errors.data] == list(range(MAX_FAULTS))
