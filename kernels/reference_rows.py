"""The metadata of a decode step from the rows' state on the device, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .contract import AttentionMetadata, BatchColumns


def advance_rows(row_ids: Tensor, rows: BatchColumns, groups: Sequence[AttentionMetadata], block_size: int) -> None:
    """Fill in the metadata of a step that computes one token of each row, and count it; see Ops.begin_decode."""
    is_padding = row_ids < 0
    live = row_ids.clamp(min=0)
    positions = rows.num_computed[live]
    places = positions if rows.rope_deltas is None else positions + rows.rope_deltas[live]
    groups[0].positions.copy_(places.masked_fill(is_padding, 0))
    groups[0].seq_lens.copy_((positions + 1).masked_fill(is_padding, 0))
    for metadata, tables in zip(groups, rows.block_tables[:, live], strict=True):
        blocks = tables.gather(1, (positions // block_size).long()[:, None])[:, 0].long()
        metadata.slots.copy_((blocks * block_size + positions % block_size).masked_fill(is_padding, -1))
        metadata.block_tables[:, : tables.shape[1]] = tables
    rows.num_computed.index_add_(0, live, (~is_padding).int())
