"""Logprobs of RequestOutput: vLLM's names and meanings, decoded from the wire's columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec

from ...ipc.codec import decode_ids
from ...ipc.messages.client import Logprobs

_CELL_BYTES = 4  # of an id, a logprob or a rank
UNDECODABLE = "\ufffd"  # stands for a part of a character in the text of a token


class Logprob(msgspec.Struct, frozen=True):
    """Logprob of one token. `rank` 1 is the likeliest token of its position, None if it is unknown; `decoded_token` is
    None without detokenization."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the token itself, then the top ones or logprob_token_ids


class FlatLogprobs(Sequence[TokenLogprobs]):
    """Logprobs of consecutive tokens in six lists, which are cheaper for the garbage collector than a dict per token.

    Token i has the entries [start_indices[i], end_indices[i]) of the other lists. Item i is a dict; {} if it has none.
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


def single_tokens(packed: Logprobs) -> Iterator[Logprobs]:
    """Yield the logprobs of each token by itself."""
    width, num_tokens = _CELL_BYTES * (packed.num_top + 1), len(packed.ranks) // _CELL_BYTES
    if num_tokens == 1:  # nearly always
        yield packed
        return
    for place in range(num_tokens):
        row, rank = slice(place * width, (place + 1) * width), slice(_CELL_BYTES * place, _CELL_BYTES * (place + 1))
        token_ids = packed.token_ids[row]
        yield msgspec.structs.replace(
            packed,
            token_ids=token_ids,
            logprobs=packed.logprobs[row],
            ranks=packed.ranks[rank],
            texts={each: packed.texts[each] for each in decode_ids(token_ids) if each in packed.texts},
        )


def unpack_rows(packed: Logprobs) -> list[list[tuple[int, float]]]:
    """Return the wire's columns as one row per token: (id, logprob) of the token itself, then of its alternatives."""
    width, values = packed.num_top + 1, array("f")
    values.frombytes(packed.logprobs)
    cells = list(zip(decode_ids(packed.token_ids), values, strict=True))
    return [cells[start : start + width] for start in range(0, len(cells), width)]


def unpack_logprobs(packed: Logprobs) -> list[TokenLogprobs]:
    """Return the wire's columns as one dict per token: the token itself first, then its alternatives."""
    texts, tokens = packed.texts, []
    for own_rank, ((own, logprob), *others) in zip(decode_ids(packed.ranks), unpack_rows(packed), strict=True):
        token = {own: Logprob(logprob, own_rank, texts.get(own))}
        for rank, (token_id, logprob) in enumerate(others, 1):
            if token_id != own:
                token[token_id] = Logprob(logprob, None if packed.are_named else rank, texts.get(token_id))
        tokens.append(token)
    return tokens
