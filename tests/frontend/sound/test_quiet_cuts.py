"""Long audio is cut in quiet places, into pieces of a bounded length that lose no sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.sound.quiet_cuts import cut_at_quiet_places
from tokenloom.ipc.spec.models.audio_config import SAMPLE_RATE

STEP, QUIET, SEARCHED = 160, 1600, 5 * SAMPLE_RATE


def pieces_of(samples: Any, most: int, *cuts: int) -> list[Any]:
    return list(cut_at_quiet_places(np.split(samples, cuts), most))


def expected_end(samples: Any) -> int:
    """Return the middle of the quietest 100 ms, by brute force over steps of 10 ms from the end."""
    begin = max(len(samples) - SEARCHED, len(samples) // 2)
    places = range(len(samples) - QUIET, begin - 1, -STEP)
    powers = [float(np.sum(np.square(samples[place : place + QUIET].astype(np.float64)))) for place in places]
    return places[int(np.argmin(powers))] + QUIET // 2


def speech(seconds: float, seed: int) -> Any:
    """Return noise with pauses of 0.2 s."""
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal(int(seconds * SAMPLE_RATE)).astype(np.float32)
    for place in rng.integers(0, len(samples), int(seconds)):
        samples[place : place + SAMPLE_RATE // 5] *= 0.01
    return samples


@settings(max_examples=20, deadline=None)
@given(seconds=st.floats(0.1, 40), most_s=st.floats(0.4, 12), seed=st.integers(0, 99), data=st.data())
def test_pieces_are_bounded_complete_and_end_at_the_quietest_place(
    seconds: float, most_s: float, seed: int, data: st.DataObject
) -> None:
    samples, most = speech(seconds, seed), int(most_s * SAMPLE_RATE)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=4)))
    pieces = pieces_of(samples, most, *cuts)
    np.testing.assert_array_equal(np.concatenate(pieces), samples)
    start = 0
    for piece in pieces[:-1]:
        assert len(piece) == expected_end(samples[start : start + most])
        start += len(piece)
    assert len(samples) - start <= most
    assert all(0 < len(piece) <= most for piece in pieces)


def test_silence_gives_pieces_as_long_as_they_may_be_and_short_audio_stays_whole() -> None:
    pieces = pieces_of(np.zeros(70 * SAMPLE_RATE, np.float32), 30 * SAMPLE_RATE)
    assert [len(piece) for piece in pieces] == [30 * SAMPLE_RATE - QUIET // 2] * 2 + [10 * SAMPLE_RATE + QUIET]
    assert len(pieces_of(np.zeros(100, np.float32), 30 * SAMPLE_RATE)) == 1
    assert pieces_of(np.zeros(0, np.float32), 30 * SAMPLE_RATE) == []


def test_no_more_than_a_piece_and_a_block_is_held() -> None:
    num_taken = 0

    def blocks() -> Any:
        nonlocal num_taken
        while True:
            num_taken += SAMPLE_RATE
            yield np.ones(SAMPLE_RATE, np.float32)

    num_given = 0
    for count, piece in enumerate(cut_at_quiet_places(blocks(), 30 * SAMPLE_RATE)):
        num_given += len(piece)
        assert num_taken - num_given <= 31 * SAMPLE_RATE
        if count == 20:
            break
