"""Resampled audio is the same signal at other times, and has nothing above half its rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.sound.resampler import Resampler
from tokenloom.ipc.spec.models.audio_config import SAMPLE_RATE
from tokenloom.tests.support.today import some

RATES = [1000, 8000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000]
ODD_RATES = [17_011, 44_099]  # have no factor in common with SAMPLE_RATE
MIN_SNR_DB = 110.0
EDGE = 2500  # outputs at either end, which zeros beyond it blur


def resampled(samples: Any, rate: int, *cuts: int) -> Any:
    resampler = Resampler(rate)
    blocks = [resampler.feed(block) for block in np.split(samples, cuts)]
    return np.concatenate([*blocks, resampler.finish()])


def snr_db(found: Any, expected: Any) -> float:
    error = found.astype(np.float64) - expected
    return float(10 * np.log10(np.mean(expected**2) / np.mean(error**2)))


def band_limited(rate: int, seconds: float) -> tuple[Any, Any]:
    """Return noise below 0.8 of both Nyquist frequencies at `rate`, and the same signal at SAMPLE_RATE: by a Fourier
    series, of which both are exact samples."""
    num_inputs, num_outputs = round(rate * seconds), round(SAMPLE_RATE * seconds)
    num_waves = int(0.4 * min(num_inputs, num_outputs))
    rng = np.random.default_rng(rate)
    series = np.zeros(max(num_inputs, num_outputs) // 2 + 1, np.complex128)
    series[1:num_waves] = rng.standard_normal(num_waves - 1) + 1j * rng.standard_normal(num_waves - 1)
    series /= num_waves
    at = lambda count: np.fft.irfft(series[: count // 2 + 1], count) * count / 16  # noqa: E731
    return at(num_inputs).astype(np.float32), at(num_outputs)


@pytest.mark.parametrize("rate", some([*RATES, *ODD_RATES], 5))
def test_noise_is_that_of_its_fourier_series(rate: int) -> None:
    samples, expected = band_limited(rate, 2.0)
    found = resampled(samples, rate)
    assert found.dtype == np.float32 and len(found) == len(expected)
    assert snr_db(found[EDGE:-EDGE], expected[EDGE:-EDGE]) > MIN_SNR_DB


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate > SAMPLE_RATE])
def test_frequencies_above_half_of_the_rate_are_suppressed(rate: int) -> None:
    for hertz in (8250, min(10_000, 0.49 * rate)):
        samples = np.sin(2 * np.pi * hertz * np.arange(rate) / rate).astype(np.float32)
        assert np.abs(resampled(samples, rate)[EDGE:-EDGE]).max() < 1e-5


@settings(max_examples=8, deadline=None)
@given(rate=st.sampled_from([8000, 16_000, 44_100, 48_000, 44_099]), data=st.data())
def test_blocks_do_not_matter(rate: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, rate))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    samples = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    whole = resampled(samples, rate)
    assert len(whole) == -(-length * SAMPLE_RATE // rate)
    np.testing.assert_allclose(resampled(samples, rate, *cuts), whole, atol=2e-6)


def test_audio_of_the_rate_itself_is_not_changed() -> None:
    samples = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(resampled(samples, SAMPLE_RATE, 10, 500), samples)


def test_what_is_held_does_not_grow_with_the_audio() -> None:
    resampler = Resampler(44_100)
    block = np.zeros(1 << 16, np.float32)
    for _ in range(20):
        resampler.feed(block)
        assert len(resampler._held) < 44_100
