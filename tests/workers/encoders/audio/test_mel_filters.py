"""The filter bank is that of transformers' feature extractors."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.audio_utils import mel_filter_bank

from tokenloom.workers.encoders.audio.mel_filters import mel_filters


@pytest.mark.parametrize(("num_samples", "num_filters"), [(400, 80), (400, 128), (512, 40), (1024, 128)])
def test_filters_are_those_of_transformers(num_samples: int, num_filters: int) -> None:
    num_bins = num_samples // 2 + 1
    theirs = mel_filter_bank(num_bins, num_filters, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    ours = mel_filters(num_bins, num_filters)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    assert np.array_equal(ours.astype(np.float32), theirs.astype(np.float32))
