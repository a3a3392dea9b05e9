"""Puts a step's TokenMask on its logits: what a grammar does not allow becomes −∞, before any other rule.

Bit t % 32 of word t / 32 says whether token t may come. Trusts no message: a mask of the wrong width is a fault of the
protocol; rows that this step does not sample are passed over, since they changed hands after the mask was ordered.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ipc.errors import ProtocolError
from ...ipc.messages.workers import TokenMask
from ..input_batch import ids_of

MaskSource = Callable[[], TokenMask | None]  # waits; None: the step's result is not wanted any more


def no_mask() -> TokenMask | None:
    return None


def apply_mask(logits: Tensor, sampled_rows: npt.NDArray[np.int32], mask: TokenMask) -> None:
    """logits: [s, vocab], changed in place. sampled_rows: [s], the row of each."""
    rows, vocab_size = ids_of(mask.rows), logits.shape[1]
    num_words = -(-vocab_size // 32)
    if len(mask.bits) != 4 * num_words * len(rows):
        raise ProtocolError(
            f"the mask of step {mask.step} has {len(mask.bits)} bytes for {len(rows)} rows and {vocab_size} tokens"
        )
    place_by_row = {row: place for place, row in enumerate(sampled_rows.tolist())}
    chosen = [i for i, row in enumerate(rows.tolist()) if row in place_by_row]
    if not chosen:
        return
    words = np.frombuffer(mask.bits, np.uint8).reshape(len(rows), 4 * num_words)[chosen]
    places = [place_by_row[int(rows[i])] for i in chosen]
    if logits.device.type == "cpu":
        forbidden = np.unpackbits(~words, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        array = logits.numpy()
        for place, row_forbidden in zip(places, forbidden, strict=True):
            array[place][row_forbidden] = -np.inf
        return
    on_device = torch.from_numpy(words).to(logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (on_device[:, :, None] >> shifts & 1).reshape(len(places), -1)[:, :vocab_size]
    index = torch.tensor(places, device=logits.device)
    logits[index] = logits[index].masked_fill(bits == 0, -torch.inf)
