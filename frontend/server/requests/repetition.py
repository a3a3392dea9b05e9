"""repeats: detects an answer that ends with the same few tokens over and over."""

from __future__ import annotations

from array import array

from ....ipc.params.sampling_params import RepetitionDetectionParams


def repeats(token_ids: array[int], params: RepetitionDetectionParams) -> bool:
    """Return whether the tokens end with `min_count` copies of a pattern of a size that `params` allow."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return False
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-length:-size] == token_ids[size - length :]:
            return True
    return False
