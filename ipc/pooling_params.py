"""PoolingParams: how the hidden states of a prompt become one vector. Names are vLLM's where it has one."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import RequestError
from .sampling_params import Range

_DIMENSIONS = Range(int, 1, 1 << 20)  # and at most the model's hidden_size


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `embed` gives: the hidden states after the final norm, of the last token or in the mean of all tokens.

    Raises RequestError, naming the field, when it is made with a value out of range.
    """

    method: Literal["last", "mean"] = "last"  # in a decoder the last token alone has seen all others
    normalize: bool = True  # to the length 1, after the cut to `dimensions`
    dimensions: int | None = None  # keep the first so many; None: all of hidden_size

    def __post_init__(self) -> None:
        if self.method not in ("last", "mean"):
            raise RequestError(f"method must be 'last' or 'mean', got {self.method!r:.80}")
        if self.dimensions is not None:
            _DIMENSIONS.check("dimensions", self.dimensions)
