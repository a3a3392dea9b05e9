"""repeats detects the token that completes a repeated pattern, and no other token."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from tokenloom.frontend.server.requests.request_state import repeats
from tokenloom.ipc.params.sampling_params import RepetitionDetectionParams


def repeats_slowly(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Compare the tokens with the repeated pattern, for each size."""
    sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    return any(
        len(tokens) >= size * params.min_count
        and list(tokens[len(tokens) - size * params.min_count :]) == list(tokens[-size:]) * params.min_count
        for size in sizes
    )


@pytest.mark.parametrize("seed", range(20))
def test_repeats_agrees_with_a_direct_comparison(seed: int) -> None:
    rng, num_found = random.Random(seed), 0
    for _ in range(200):
        most = rng.randrange(1, 6)
        params = RepetitionDetectionParams(most, rng.randrange(most + 1), rng.randrange(2, 5))
        tokens = array("i", rng.choices(range(2), k=rng.randrange(1, 20)))
        assert repeats(tokens, params) == repeats_slowly(tokens, params)
        num_found += repeats(tokens, params)
    assert 20 < num_found < 180
    assert not repeats(array("i", [1] * 9), RepetitionDetectionParams())
