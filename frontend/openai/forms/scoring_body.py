"""Define the body of vLLM's generative scoring."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from ....ipc.sampling_params import MAX_LOGPROB_TOKEN_IDS
from .schema import MAX_PROMPTS, Scheduled, Text, TokenId, items

_Part: TypeAlias = Text | Annotated[list[TokenId], items(1)]
_Parts: TypeAlias = Annotated[list[_Part], items(1, MAX_PROMPTS)]
_Labels: TypeAlias = Annotated[list[TokenId], items(1, MAX_LOGPROB_TOKEN_IDS)]


class GenerativeScoringRequest(Scheduled, frozen=True, kw_only=True):
    """POST /generative_scoring: each prompt is the query and one of the items."""

    query: _Part
    items: _Parts
    label_token_ids: _Labels  # the score is the probability of the first
    apply_softmax: bool | None = None  # normalize over the labels; null: true
    item_first: bool | None = None
    add_special_tokens: bool | None = None  # to the query; null: true
