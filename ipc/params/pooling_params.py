"""PoolingParams: parameters of an embedding, with vLLM's names where it has them."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import RequestError
from .public_struct import PublicStruct
from .sampling_params import Range

_DIMENSIONS = Range(int, 1, 1 << 20)  # and at most the model's hidden_size


class PoolingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=PublicStruct
):
    """Parameters of `embed`: how it pools the hidden states after the final norm, and scales and cuts the result.

    A value out of range raises RequestError with the field's name.
    """

    method: Literal["last", "mean"] = "last"  # of the last token, which alone attends to all others; or of all tokens
    normalize: bool = True  # to length 1, after the cut to `dimensions`
    dimensions: int | None = None  # keep the first elements; None: all of hidden_size
    use_activation: bool | None = None  # vLLM's name of `normalize`; if given, it sets that field

    def __post_init__(self) -> None:
        if self.method not in ("last", "mean"):
            raise RequestError(f"method must be 'last' or 'mean', got {self.method!r:.80}")
        if self.dimensions is not None:
            _DIMENSIONS.check("dimensions", self.dimensions)
        if self.use_activation is not None:
            msgspec.structs.force_setattr(self, "normalize", self.use_activation)
            msgspec.structs.force_setattr(self, "use_activation", None)
