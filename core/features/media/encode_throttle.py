"""EncodeThrottle: limits the encoder's work in a step that also has decoding rows.

As with prompts (prefill_throttle.py), this work may add PAUSE_S to a step, or half a decode step's time if that is
longer, prompts included. There is no limit without decoding rows, nor in a burst: if more than BURST media are wanted
for each decoding row, all that are wanted at that time are encoded without a limit. Costs are learned from finished
steps, for each kind of stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ....ipc.spec.models.vision_config import Stage
from ...scheduling.prefill_throttle import PrefillThrottle, blend, pause_s

BURST = 2  # with more wanted media than this for each decoding row, all are encoded at once


class StageWork(NamedTuple):
    """A part of a stage that a step runs."""

    stage: Stage
    num_rows: int  # of the medium: attention takes longer per row in a larger one
    work: float  # rows that go through the stage


class EncodeThrottle:
    """Owner of moving averages: seconds per row that goes through a stage, by stage and size of the medium (a power
    of two of rows)."""

    def __init__(self, prefills: PrefillThrottle) -> None:
        self._prefills = prefills
        self._row_s: dict[Stage, dict[int, float]] = {}  # by stage and bits of the number of rows
        self._burst_media = 0  # media of the burst that are still to be encoded

    def on_step(self, num_decodes: int, num_prompt_tokens: int, parts: Sequence[StageWork], seconds: float) -> None:
        """Update the averages with a finished step that has run these parts of media. If the parts are of several
        stages, the known costs are scaled so that their sum is the media's share of `seconds`."""
        others_s = self._prefills.seconds(num_decodes, num_prompt_tokens)
        if seconds <= 0 or not parts or others_s is None:
            return
        seconds = max(seconds - others_s, 0.05 * seconds)
        costs = [self.row_s(part.stage, part.num_rows) for part in parts]
        if len({part.stage for part in parts}) == 1:
            costs = [seconds / sum(part.work for part in parts)] * len(parts)
        elif math.inf not in costs:
            factor = seconds / sum(part.work * cost for part, cost in zip(parts, costs, strict=True))
            costs = [cost * factor for cost in costs]
        for part, cost in zip(parts, costs, strict=True):
            if cost < math.inf:
                known, size = self._row_s.setdefault(part.stage, {}), part.num_rows.bit_length()
                known[size] = blend(known.get(size), cost)

    def share_s(self, num_decodes: int, num_prompt_tokens: int, num_wanted: int) -> float:
        """Return the seconds that the next step may spend on encoding `num_wanted` media, in addition to its decoding
        rows and prompts; infinite without a limit, 0 if the costs are unknown. Call it once for each step."""
        left = num_wanted if num_wanted > BURST * num_decodes else min(self._burst_media, num_wanted)
        self._burst_media = max(left - 1, 0)
        if left:
            return math.inf
        decodes_s = self._prefills.seconds(num_decodes, 0)
        all_s = self._prefills.seconds(num_decodes, num_prompt_tokens)
        if decodes_s is None or all_s is None:
            return 0.0
        return max(decodes_s + pause_s(decodes_s, 1) - all_s, 0.0)

    @property
    def is_burst(self) -> bool:
        """Whether media of a burst are left after the last step."""
        return self._burst_media > 0

    def end_burst(self) -> None:
        """End a burst: no media are wanted."""
        self._burst_media = 0

    def row_s(self, stage: Stage, num_rows: int) -> float:
        """Return the seconds that a row takes through a stage, for a medium of the known size nearest to `num_rows`;
        infinite if none is known."""
        known, size = self._row_s.get(stage, {}), num_rows.bit_length()
        return known[min(known, key=lambda each: abs(each - size))] if known else math.inf
