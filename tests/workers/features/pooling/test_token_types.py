"""Tokens of a row have the type that its request says, whatever rows share the step."""

from __future__ import annotations

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.workers import NewRow, RowSampling, SchedulerOutput
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.workers.features.pooling.token_types import TokenTypes
from tokenloom.workers.step.input_batch import InputBatch


def run(types: TokenTypes, firsts: dict[int, int | None], lengths: dict[int, int]) -> list[int] | None:
    """Return the types in a step that admits these rows, frees them afterwards, and has no others."""
    new_rows = [
        NewRow(
            row=row,
            token_ids=encode_ids(range(length)),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            sampling=RowSampling(),
            pooling=PoolingParams(first_type_tokens=firsts[row]),
        )
        for row, length in lengths.items()
    ]
    batch = InputBatch(8, 64, 4, [64], is_encoder=True)
    for each in new_rows:
        batch.admit(each)
    rows, counts = encode_ids(lengths), encode_ids(lengths.values())
    types.update(SchedulerOutput(step=1, core_epoch=0, generation=0, rows=rows, counts=counts, new_rows=new_rows))
    found = types.prepare(batch.prepare(batch.layout(rows, counts))).token_types
    empty = encode_ids([])
    types.update(SchedulerOutput(step=2, core_epoch=0, generation=0, rows=empty, counts=empty, freed_rows=rows))
    return None if found is None else found.tolist()


def test_types_begin_where_each_request_says() -> None:
    found = run(TokenTypes(), {0: 2, 1: None, 3: 4}, {0: 5, 1: 3, 3: 4})
    assert found == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_a_freed_row_leaves_its_types_behind() -> None:
    types = TokenTypes()
    assert run(types, {2: 1}, {2: 3}) == [0, 1, 1]
    assert run(types, {2: None}, {2: 3}) is None
    assert run(types, {2: 2}, {2: 3}) == [0, 0, 1]
