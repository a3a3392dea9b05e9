"""Logprob: how likely the model found a token, as a caller gets it. Names and meanings are vLLM's."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

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


class FlatLogprobs(Sequence[TokenLogprobs]):
    """Logprobs of tokens in a row in six lists, which the garbage collector walks faster than many small dicts.

    The entries of token i stand in [start_indices[i], end_indices[i]) of the others; a token without any is an empty
    dict.
    """

    def __init__(self, tokens: Iterable[TokenLogprobs | None] = ()) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for token in tokens:
            self.append(token)

    def append(self, token: TokenLogprobs | None) -> None:
        self.start_indices.append(len(self.token_ids))
        for token_id, found in (token or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(found.logprob)
            self.ranks.append(found.rank)
            self.decoded_tokens.append(found.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> FlatLogprobs: ...

    def __getitem__(self, place: int | slice) -> TokenLogprobs | FlatLogprobs:
        if isinstance(place, slice):
            return FlatLogprobs(self[i] for i in range(*place.indices(len(self))))
        entries = range(self.start_indices[place], self.end_indices[place])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in entries}


def unpack_rows(packed: Logprobs) -> list[list[tuple[int, float]]]:
    """Per token: (id, logprob) of itself and then of the others."""
    width, values = packed.num_top + 1, array("f")
    values.frombytes(packed.logprobs)
    cells = list(zip(decode_ids(packed.token_ids), values, strict=True))
    return [cells[start : start + width] for start in range(0, len(cells), width)]


def unpack_logprobs(packed: Logprobs) -> list[TokenLogprobs]:
    """One dict per token."""
    texts, tokens = packed.texts, []
    for own_rank, ((own, logprob), *others) in zip(decode_ids(packed.ranks), unpack_rows(packed), strict=True):
        token = {own: Logprob(logprob, own_rank, texts.get(own))}
        for rank, (token_id, logprob) in enumerate(others, 1):
            if token_id != own:
                token[token_id] = Logprob(logprob, None if packed.are_named else rank, texts.get(token_id))
        tokens.append(token)
    return tokens
