"""Application of a step's TokenMask: logits of tokens that the grammar forbids become −∞, before any processor.

Bit t % 32 of word t // 32 is set if token t is allowed. Rows that this step does not sample are skipped: they were
freed after the mask was requested.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ProtocolError
from ...ipc.messages.workers import TokenMask
from ..machine.arrays import I32, ids_of

MaskSource = Callable[[], TokenMask | None]  # waits for the mask; None: the step's result is no longer needed


def mask_counts(mask: TokenMask | None) -> dict[int, int]:
    """Return the number of masks of each row in `mask`, in the mask's order. ProtocolError if the mask's rows or counts
    are inconsistent."""
    if mask is None:
        return {}
    rows = ids_of(mask.rows).tolist()
    counts = ids_of(mask.counts).tolist() if mask.counts else [1] * len(rows)
    if len(counts) != len(rows) or len(set(rows)) != len(rows) or min(counts, default=1) < 1:
        raise ProtocolError(f"the mask of step {mask.step} has {counts} masks for the rows {rows}")
    return dict(zip(rows, counts, strict=True))


def apply_mask(logits: Tensor, sampled_rows: I32, mask: TokenMask) -> None:
    """Mask the logits [s, vocab] of the rows in `mask`, in place. sampled_rows: [s], the row to which each vector of
    logits belongs; a row with drafts has several, and its masks are for the first of them. ProtocolError if the mask
    has a wrong size or inconsistent rows or counts."""
    vocab_size, counts = logits.shape[1], mask_counts(mask)
    num_words = -(-vocab_size // 32)
    if len(mask.bits) != 4 * num_words * sum(counts.values()):
        raise ProtocolError(
            f"the mask of step {mask.step} has {len(mask.bits)} bytes for {sum(counts.values())} masks of "
            f"{vocab_size} tokens"
        )
    indices_by_row: dict[int, list[int]] = {}
    for index, row in enumerate(sampled_rows.tolist()):
        indices_by_row.setdefault(row, []).append(index)
    chosen, indices, start = list[int](), list[int](), 0
    for row, count in counts.items():
        own = indices_by_row.get(row, [])[:count]
        chosen += range(start, start + len(own))
        indices += own
        start += count
    if not chosen:
        return
    words = np.frombuffer(mask.bits, np.uint8).reshape(-1, 4 * num_words)[chosen]
    if logits.device.type == "cpu":
        forbidden = np.unpackbits(~words, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        array = logits.numpy()
        for index, row_forbidden in zip(indices, forbidden, strict=True):
            array[index][row_forbidden] = -np.inf
        return
    on_device = torch.from_numpy(words).to(logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (on_device[:, :, None] >> shifts & 1).reshape(len(indices), -1)[:, :vocab_size]
    masked = torch.tensor(indices, device=logits.device)
    logits[masked] = logits[masked].masked_fill(bits == 0, -torch.inf)
