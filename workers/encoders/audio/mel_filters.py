"""The mel filter bank of Whisper's models: triangles over the bins of a spectrum, by Slaney's scale of mels.

Slaney's scale (Auditory Toolbox, 1998) has 3 mels for 200 Hz up to 1 kHz, and beyond it 27 mels for a factor of 6.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....ipc.spec.models.audio_config import SAMPLE_RATE

MELS_PER_HZ = 3 / 200
CORNER_HZ, CORNER_MELS = 1000.0, 15.0  # where the scale becomes logarithmic
MELS_PER_FOLD = 27 / np.log(6.4)


def mel_filters(num_bins: int, num_filters: int) -> Any:
    """Return float64 [num_bins, num_filters] for bins from 0 Hz to half the sample rate. Filters overlap by half, and
    have equal areas."""
    top_hz = SAMPLE_RATE / 2
    top = CORNER_MELS + np.log(top_hz / CORNER_HZ) * MELS_PER_FOLD
    corners = _hertz_of(np.linspace(0.0, top, num_filters + 2))  # begin, top and end of each filter are neighbours
    bins = np.linspace(0.0, top_hz, num_bins)[:, None]
    widths = np.diff(corners)
    rising, falling = (bins - corners[:-2]) / widths[:-1], (corners[2:] - bins) / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (corners[2:] - corners[:-2]))


def _hertz_of(mels: Any) -> Any:
    return np.where(mels < CORNER_MELS, mels / MELS_PER_HZ, CORNER_HZ * np.exp((mels - CORNER_MELS) / MELS_PER_FOLD))
