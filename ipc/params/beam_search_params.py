"""BeamSearchParams: parameters of a beam search, with vLLM's names."""

from __future__ import annotations

import msgspec

from ..errors import RequestError
from .public_struct import PublicStruct
from .sampling_params import MAX_CHILDREN, RANGES, Range


class BeamSearchParams(msgspec.Struct, kw_only=True, frozen=True, metaclass=PublicStruct):
    """Parameters of a beam search.

    A beam's score is cum_logprob / n ** length_penalty, where n counts prompt and output tokens without an end token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect on scores, which use the model's own probabilities
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # keep the end token in `text`
    structured_outputs: object = None  # vLLM's field; must be None

    def __post_init__(self) -> None:
        Range(int, 1, MAX_CHILDREN).check("beam_width", self.beam_width)
        Range(float, -100, 100).check("length_penalty", self.length_penalty)
        RANGES["max_tokens"].check("max_tokens", self.max_tokens)
        if self.structured_outputs is not None:
            raise RequestError(
                "structured_outputs is not served in a beam search: leave it out, or use generate with n answers"
            )
