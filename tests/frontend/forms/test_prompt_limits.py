"""Which prompts a truncation makes fit, and the tokens that it may keep."""

from __future__ import annotations

import pytest

from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.params.sampling_params import CutSide

LIMITS = PromptLimits(max_model_len=4, max_answers=8, max_tokens=64)


@pytest.mark.parametrize(
    ("length", "side", "cut_side"),
    [(None, None, None), (5, "left", None), (4, None, "left"), (4, "right", "right"), (1, "left", "left")],
)
def test_only_a_truncation_to_a_length_that_fits_cuts(
    length: int | None, side: CutSide | None, cut_side: CutSide | None
) -> None:
    assert LIMITS.cut_side(length, side) == cut_side


@pytest.mark.parametrize(
    ("num_tokens", "cut_side", "kept"),
    [(6, None, range(6)), (4, "left", range(4)), (6, "left", range(2, 6)), (6, "right", range(4))],
)
def test_a_cut_keeps_as_many_tokens_as_fit(num_tokens: int, cut_side: CutSide | None, kept: range) -> None:
    assert decode_ids(LIMITS.kept(encode_ids(range(num_tokens)), cut_side)).tolist() == list(kept)
