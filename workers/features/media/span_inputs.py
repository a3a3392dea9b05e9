"""SpanInputs: adds the media of a step to its inputs, as tensors on the device, by the plan of MediaRows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ....kernels.contract import StepMedia
from ...machine.arrays import I64
from ...step.step_inputs import StepInputs
from ...step.step_layout import MediaInputs
from .media_rows import MediaPlan, MediaRows


class SpanInputs:
    """Maker of the inputs of steps with media. `rows`: the spans of the running rows."""

    def __init__(
        self,
        rows: MediaRows,
        take: Callable[[int, int, int], Tensor],
        num_parts: int,
        device: torch.device,
        rotations_at: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """take: returns embeddings of an entry, as EncodedMedia.take. num_parts: parts of an embedding, one for the
        residual stream and one for each inner layer. `rotations_at`: as in MediaRunner."""
        self.rows, self._take, self._num_parts = rows, take, num_parts
        self._device, self._rotations_at = device, rotations_at

    @property
    def shifts(self) -> I64 | None:
        return None if self._rotations_at is None else self.rows.shifts

    def prepare(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with its media. Placeholders get token id 0: theirs may be beyond the vocabulary."""
        plan = self.rows.plan(inputs)
        if plan is None:
            return inputs
        if plan.tokens is not None:
            inputs.token_ids[plan.tokens] = 0
        return inputs._replace(media=self._inputs_of(plan, len(inputs.token_ids)))

    def _inputs_of(self, plan: MediaPlan, num_tokens: int) -> MediaInputs:
        positions, cos_sin = plan.positions, None
        if positions is not None and positions.ndim == 2:
            assert self._rotations_at is not None, "a model comes before steps"
            cos_sin = self._rotations_at(torch.from_numpy(positions).to(self._device))
            positions = np.arange(num_tokens)
        see_until = None if plan.see_until is None else torch.from_numpy(plan.see_until).to(self._device)
        media = None
        if plan.tokens is not None:
            embeds = torch.cat([self._take(*piece) for piece in plan.pieces])
            parts = embeds.view(len(embeds), self._num_parts, -1).unbind(1)
            media = StepMedia(torch.from_numpy(plan.tokens).to(self._device), parts[0], parts[1:])
        return MediaInputs(plan.is_behind_spans, positions, cos_sin, see_until, media)
