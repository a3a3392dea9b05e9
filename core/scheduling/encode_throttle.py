"""EncodeThrottle: how many layers of the encoder may join a step beside decoding rows.

As with prompts (prefill_throttle.py), they may add half a step's time to it, prompts in the step included; at least one
layer goes with it. Without decoding rows a medium is encoded at once, and so it is if more media are wanted than rows
decode, or for the last media of such a burst. Its cost is learned from finished steps by layers × patches.
"""

from __future__ import annotations

import math

from .prefill_throttle import SHARE, PrefillThrottle, blend


class EncodeThrottle:
    """Owns moving averages: seconds per layer and patch, by the size of the medium (a power of two of patches), since
    attention takes longer per patch in a larger one."""

    def __init__(self, prefills: PrefillThrottle) -> None:
        self._prefills = prefills
        self._patch_s: dict[int, float] = {}  # by bits of the number of patches
        self._burst_steps = 0  # that the last media of a burst may still take

    def on_step(self, num_decodes: int, num_prompt_tokens: int, patches: int, work: int, seconds: float) -> None:
        """Update the averages with a finished step that has run `work` layers × patches of media, the largest of
        `patches`."""
        others_s = self._prefills.seconds(num_decodes, num_prompt_tokens)
        if seconds > 0 and work and others_s is not None:
            size = patches.bit_length()
            self._patch_s[size] = blend(self._patch_s.get(size), max(seconds - others_s, 0.05 * seconds) / work)

    def share_s(self, num_decodes: int, num_prompt_tokens: int, num_wanted: int) -> float:
        """Return the seconds that the next step may take to encode `num_wanted` media, beside its decoding rows and
        prompts; infinite without a limit, 0 if the costs are unknown. Call it once for a step."""
        if num_wanted > num_decodes:
            self._burst_steps += num_decodes > 0
            return math.inf
        is_tail = self._burst_steps > 0
        self._burst_steps -= is_tail
        if is_tail:
            return math.inf
        decodes_s, all_s = (
            self._prefills.seconds(num_decodes, 0),
            self._prefills.seconds(num_decodes, num_prompt_tokens),
        )
        return 0.0 if decodes_s is None or all_s is None else max((1 + SHARE) * decodes_s - all_s, 0.0)

    def num_layers(self, patches: int, seconds: float) -> int:
        """Return how many layers of a medium take at most `seconds`, which are finite; 0 if their cost is unknown."""
        return int(seconds / self.seconds(patches)) if self._patch_s else 0

    def seconds(self, patches: int) -> float:
        """Return the seconds of a layer, by the known size next to this one; 0 if none is known."""
        size = patches.bit_length()
        nearest = min(self._patch_s, key=lambda known: abs(known - size), default=None)
        return 0.0 if nearest is None else self._patch_s[nearest] * patches
