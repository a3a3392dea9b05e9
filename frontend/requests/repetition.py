"""Whether an answer repeats itself: its last tokens are the same few, again and again."""

from __future__ import annotations

from array import array

from ...ipc.sampling_params import RepetitionDetectionParams


def repeats(token_ids: array[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tokens end with `min_count` times one pattern of a size that is asked for."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return False
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-length:-size] == token_ids[size - length :]:
            return True
    return False
