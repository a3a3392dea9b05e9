"""ClipInputs: makes the inputs of a step for a decoder with cross attention to the audio clips of its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ....kernels.contract import AttentionMetadata, CrossStep
from ...machine.arrays import I64
from ...step.step_inputs import StepInputs
from ...step.step_layout import MediaInputs
from .clip_rows import ClipRows, ClipStep
from .media_rows import Piece


class ClipInputs:
    """Maker of the inputs of steps whose rows begin with clips. `rows`: the clips of the running rows. `shifts`: for
    each row, the position minus the index of the tokens after its clip."""

    def __init__(self, rows: ClipRows, take: Callable[[int, int, int], Tensor], padding: Tensor) -> None:
        """take: returns encoder rows of an entry, as EncodedMedia.take. padding: [1, hidden_size] on the device, stands
        for each row after a clip's end."""
        self.rows, self._take, self._padding = rows, take, padding
        self.shifts: I64 = np.full(rows.max_num_seqs, -rows.num_tokens, np.int64)

    def prepare(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs, completed by the decoder's own inputs (field `decoder`) with its cross
        attention."""
        step = self.rows.split(inputs)
        rows = torch.cat([self._rows_of(piece) for piece in step.pieces]) if step.pieces else None
        cross = CrossStep(_metadata(step, self.rows.num_rows, self._padding.device), rows)
        media = MediaInputs(is_behind_spans=True, positions=step.positions, cross=cross)
        decoder = step.decoder._replace(media=media)
        return inputs._replace(media=MediaInputs(is_behind_spans=rows is None), decoder=decoder)

    def _rows_of(self, piece: Piece) -> Tensor:
        return self._take(*piece) if piece.entry else self._padding.expand(piece.num_embeds, -1)


def _metadata(step: ClipStep, num_rows: int, device: torch.device) -> AttentionMetadata:
    """Return the metadata of a step's cross attention: each token sees all rows of its clip, `num_rows`."""
    decoder, num_tokens = step.decoder, len(step.positions)
    seq_lens, slots = np.full_like(decoder.seq_lens, num_rows), torch.from_numpy(step.slots).to(device)
    has_prompts = decoder.num_decode_rows < len(decoder.rows)
    return AttentionMetadata(
        positions=torch.zeros_like(slots),
        slots=slots,
        query_starts=torch.from_numpy(decoder.query_starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_tables=torch.from_numpy(step.clip_tables).to(device),
        num_decode_rows=decoder.num_decode_rows,
        query_starts_host=decoder.query_starts.tolist(),
        seq_lens_host=seq_lens.tolist(),
        see_until=torch.full((num_tokens,), num_rows - 1, dtype=torch.int32, device=device) if has_prompts else None,
    )
