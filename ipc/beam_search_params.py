"""What a search for the likeliest continuations of a prompt may ask for: BeamSearchParams, as vLLM names them."""

from __future__ import annotations

import msgspec

from .sampling_params import MAX_CHILDREN, RANGES, Range


class BeamSearchParams(msgspec.Struct, kw_only=True, frozen=True):
    """A beam's score is its cum_logprob / (its tokens, the prompt's too, but for an end token) ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # scores are of the model's own probabilities, whatever it is
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # the end token, in `text`

    def __post_init__(self) -> None:
        Range(int, 1, MAX_CHILDREN).check("beam_width", self.beam_width)
        Range(float, -100, 100).check("length_penalty", self.length_penalty)
        RANGES["max_tokens"].check("max_tokens", self.max_tokens)
