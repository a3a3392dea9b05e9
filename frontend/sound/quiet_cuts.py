"""Cut long audio at quiet places, so that no word is cut where a pause is near."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ...ipc.spec.models.audio_config import SAMPLE_RATE
from .sound import Samples

STEP = SAMPLE_RATE // 100  # quiet places are found to 10 ms
QUIET_STEPS = 10  # of a quiet place, which is 100 ms
SEARCHED = 5 * SAMPLE_RATE  # last samples of a piece in which it may end, at most half of it


def cut_at_quiet_places(blocks: Iterable[Samples], most: int) -> Iterator[Samples]:
    """Yield the samples of `blocks` as pieces of at most `most` samples, of which there must be 0.4 s.

    A piece ends in the middle of the quietest 100 ms of the last 5 s that it may have; of several, the last ones. It
    holds no more of the blocks than a piece and a block."""
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
    """Return where a piece of at most these samples ends."""
    begin = max(len(samples) - SEARCHED, len(samples) // 2)
    steps = (len(samples) - begin) // STEP
    begin = len(samples) - steps * STEP
    powers = np.square(samples[begin:].astype(np.float64)).reshape(steps, STEP).sum(axis=1)
    places = np.lib.stride_tricks.sliding_window_view(powers, QUIET_STEPS).sum(axis=1)
    quietest = len(places) - 1 - int(places[::-1].argmin())
    return begin + (quietest + QUIET_STEPS // 2) * STEP
