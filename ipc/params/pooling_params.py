"""PoolingParams: parameters of a request that pools its prompt, with vLLM's names where it has them."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from ..errors import RequestError
from .public_struct import PublicStruct
from .sampling_params import LENGTH, Range

PoolingTask: TypeAlias = Literal["embed", "classify", "score", "token_embed", "token_classify"]
PoolingMethod: TypeAlias = Literal["last", "cls", "mean", "max", "weighted", "mean_sqrt"]
TOKEN_TASKS = ("token_embed", "token_classify")  # their result has a row for each token of the prompt
EMBEDDING_TASKS = ("embed", "token_embed")
MAX_RETURNED_IDS = 1024
_DIMENSIONS = Range(int, 1, 1 << 20)  # and at most the size of the model's vectors
_TOKEN_ID = Range(int, 0, 2**31 - 1)


class PoolingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=PublicStruct
):
    """Parameters of `embed`, `classify`, `score`, `encode` and `reward`: the result that is made of a prompt's hidden
    states.

    A value out of range raises RequestError with the field's name. The engine replaces None by the model's own value.
    """

    task: PoolingTask | None = None  # None: that of the method that is called, or the model's first
    method: PoolingMethod | None = None  # how one vector is made of the states of all tokens; None: the model's own
    use_activation: bool | None = None  # scale an embedding to length 1; make probabilities of logits
    normalize: bool | None = None  # the older name of `use_activation`; if given, it sets that field
    dimensions: int | None = None  # keep the first elements of an embedding; None: all
    truncate_prompt_tokens: int | None = None  # as in SamplingParams
    step_tag_id: int | None = None  # task token_classify: return only the rows of tokens with this id
    returned_token_ids: list[int] | None = None  # task token_classify: return only these columns of the logits
    skip_reading_prefix_cache: bool | None = None  # as in SamplingParams
    prompt_name: str | None = None  # the model's prompt to put before a text to embed; "": none
    first_type_tokens: int | None = None  # set by the engine: the tokens before those of the second token type

    def __post_init__(self) -> None:
        for name, known in (("task", PoolingTask), ("method", PoolingMethod)):
            value = getattr(self, name)
            if value is not None and value not in get_args(known):
                raise RequestError(f"{name} must be {', '.join(map(repr, get_args(known)))}, got {value!r:.80}")
        if self.dimensions is not None:
            _DIMENSIONS.check("dimensions", self.dimensions)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            LENGTH.check("truncate_prompt_tokens", self.truncate_prompt_tokens)
        if self.step_tag_id is not None:
            _TOKEN_ID.check("step_tag_id", self.step_tag_id)
        if self.returned_token_ids is not None:
            self._check_returned_ids(self.returned_token_ids)
        if self.normalize is not None:
            msgspec.structs.force_setattr(self, "use_activation", self.normalize)
            msgspec.structs.force_setattr(self, "normalize", None)

    def _check_returned_ids(self, ids: list[int]) -> None:
        if not 0 < len(ids) <= MAX_RETURNED_IDS:
            raise RequestError(f"returned_token_ids has {len(ids)} ids: give 1 to {MAX_RETURNED_IDS}")
        for each in ids:
            _TOKEN_ID.check("returned_token_ids", each)

    @property
    def is_token_level(self) -> bool:
        """Whether the result has a row for each token."""
        return self.task in TOKEN_TASKS

    @property
    def needs_all_states(self) -> bool:
        """Whether the hidden states of all tokens count, so that no block may come from a cache."""
        return self.is_token_level or self.method not in (None, "last") or bool(self.skip_reading_prefix_cache)
