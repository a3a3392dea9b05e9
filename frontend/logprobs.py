"""Logprob: how likely the model found a token, as a caller gets it. Names and meanings are vLLM's."""

from __future__ import annotations

from array import array

import msgspec

from ..ipc.codec import decode_ids
from ..ipc.messages import Logprobs


class Logprob(msgspec.Struct, frozen=True):
    """`rank` 1 is the likeliest token at this place; `decoded_token` is None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the token itself first, then the likeliest by falling logprob


def unpack_logprobs(packed: Logprobs) -> list[TokenLogprobs]:
    """One dict per token."""
    width = packed.num_top + 1
    token_ids, ranks, logprobs = decode_ids(packed.token_ids), decode_ids(packed.ranks), array("f")
    logprobs.frombytes(packed.logprobs)
    texts = packed.texts
    tokens = []
    for i, own_rank in enumerate(ranks):
        start = i * width
        own = token_ids[start]
        token = {own: Logprob(logprobs[start], own_rank, texts.get(own))}
        for rank in range(1, width):
            token_id = token_ids[start + rank]
            if token_id != own:
                token[token_id] = Logprob(logprobs[start + rank], rank, texts.get(token_id))
        tokens.append(token)
    return tokens
