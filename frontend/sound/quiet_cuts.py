"""Cut long audio at quiet places, so that cuts are in pauses, if there are any, and not inside words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ...ipc.spec.models.audio_config import SAMPLE_RATE
from .sound import Samples

STEP = SAMPLE_RATE // 100  # samples: quiet places are found with a resolution of 10 ms
QUIET_STEPS = 10  # length of a quiet place in steps: 100 ms
SEARCHED = 5 * SAMPLE_RATE  # samples at the end of a piece that are searched for a quiet place, at most half of it


def cut_at_quiet_places(blocks: Iterable[Samples], most: int) -> Iterator[Samples]:
    """Yield the samples of `blocks` as pieces of at most `most` samples, which must be at least 0.4 s.

    Each piece but the last ends in the middle of the quietest 100 ms in the last 5 s of its longest possible extent, or
    in the last half of it if that is less (of several equal places, the last). At most two copies of a piece and a
    block are in memory."""
    held: list[Samples] = []
    num_held = 0
    for block in blocks:
        held.append(block)
        num_held += len(block)
        while num_held > most:
            whole = np.concatenate(held)
            end = _end(whole[:most])
            yield whole[:end]
            held, num_held = [whole[end:]], num_held - end
    if num_held:
        yield np.concatenate(held)


def _end(samples: Samples) -> int:
    """Return the length, in samples, of a piece that may have at most these samples."""
    begin = max(len(samples) - SEARCHED, len(samples) // 2)
    steps = (len(samples) - begin) // STEP
    begin = len(samples) - steps * STEP
    powers = np.square(samples[begin:].astype(np.float64)).reshape(steps, STEP).sum(axis=1)
    places = np.lib.stride_tricks.sliding_window_view(powers, QUIET_STEPS).sum(axis=1)
    quietest = len(places) - 1 - int(places[::-1].argmin())
    return begin + (quietest + QUIET_STEPS // 2) * STEP
