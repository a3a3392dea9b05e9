"""Applies a step's TokenMask: tokens that the grammar forbids become −∞, before any processor.

Bit t % 32 of word t // 32 is set if token t is allowed. A mask of the wrong width is a ProtocolError. Rows that this
step does not sample are skipped: they were freed after the mask was requested.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ProtocolError
from ...ipc.messages.workers import TokenMask
from ..arrays import I32
from ..input_batch import ids_of

MaskSource = Callable[[], TokenMask | None]  # waits for the mask; None: nobody needs the step's result any more


def apply_mask(logits: Tensor, sampled_rows: I32, mask: TokenMask) -> None:
    """Mask logits [s, vocab] of the rows that `mask` names, in place. sampled_rows: [s], the row of each."""
    rows, vocab_size = ids_of(mask.rows), logits.shape[1]
    num_words = -(-vocab_size // 32)
    if len(mask.bits) != 4 * num_words * len(rows):
        raise ProtocolError(
            f"the mask of step {mask.step} has {len(mask.bits)} bytes for {len(rows)} rows and {vocab_size} tokens"
        )
    index_by_row = {row: index for index, row in enumerate(sampled_rows.tolist())}
    chosen = [i for i, row in enumerate(rows.tolist()) if row in index_by_row]
    if not chosen:
        return
    words = np.frombuffer(mask.bits, np.uint8).reshape(len(rows), 4 * num_words)[chosen]
    indices = [index_by_row[int(rows[i])] for i in chosen]
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
