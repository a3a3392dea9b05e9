"""Logprob: how likely the model found a token, as a caller gets it. Names and meanings are vLLM's."""

from __future__ import annotations

from array import array

import msgspec

from ...ipc.codec import decode_ids
from ...ipc.messages.client import Logprobs


class Logprob(msgspec.Struct, frozen=True):
    """`rank` 1 is the likeliest token at this place, None if it is not known; `decoded_token` is None where no text is
    made."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the token itself first, then the likeliest by falling logprob, or those named


def rows_of(packed: Logprobs) -> list[list[tuple[int, float]]]:
    """Per token: (id, logprob) of itself and then of the others."""
    width, values = packed.num_top + 1, array("f")
    values.frombytes(packed.logprobs)
    cells = list(zip(decode_ids(packed.token_ids), values, strict=True))
    return [cells[start : start + width] for start in range(0, len(cells), width)]


def unpack_logprobs(packed: Logprobs) -> list[TokenLogprobs]:
    """One dict per token."""
    texts, tokens = packed.texts, []
    for own_rank, ((own, logprob), *others) in zip(decode_ids(packed.ranks), rows_of(packed), strict=True):
        token = {own: Logprob(logprob, own_rank, texts.get(own))}
        for rank, (token_id, logprob) in enumerate(others, 1):
            if token_id != own:
                token[token_id] = Logprob(logprob, None if packed.are_named else rank, texts.get(token_id))
        tokens.append(token)
    return tokens
