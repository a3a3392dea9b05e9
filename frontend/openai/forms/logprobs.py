"""Log probabilities in the two forms that OpenAI gives them: columns for completions, objects for chats;
and those of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import Delta, Logprobs
from ...client.logprobs import Logprob, unpack_logprobs, unpack_rows

LOWEST = -9999.0  # JSON has no −∞; OpenAI writes this


class CompletionLogprobs:
    """The columns {tokens, token_logprobs, top_logprobs, text_offset}; `take` gives what was added since the last."""

    def __init__(self, *, with_ids: bool = False) -> None:
        """`with_ids`: tokens are written token_id:ID instead of as text."""
        self._with_ids = with_ids
        self._offset = 0  # in characters of the choice's text
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_first(self, token_id: int, text: str) -> None:
        """The first token of an echoed prompt, which nothing came before."""
        self._add(_name(token_id, text, self._with_ids), text, None, None)

    def add(self, logprobs: Logprobs | None) -> None:
        for tokens in _rows(logprobs, self._with_ids):
            name, text, logprob = tokens[0]
            top = {name: logprob for name, _, logprob in reversed(tokens[1:])}  # of one name: the likeliest
            self._add(name, text, logprob, {name: logprob} | top | {name: logprob})

    def _add(self, name: str, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._rows.append((name, logprob, top, self._offset))
        self._offset += len(text)

    def take(self) -> JsonObject:
        rows, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def chat_logprobs(delta: Delta, *, with_ids: bool = False) -> list[JsonObject]:
    """One object for each token of the delta: the token itself and the likeliest at its place. `with_ids`: tokens are
    written token_id:ID, and their text is in `bytes` alone."""
    return [
        _token(*tokens[0]) | {"top_logprobs": [_token(*each) for each in tokens[1:]]}
        for tokens in _rows(delta.logprobs, with_ids)
    ]


def prompt_logprob_dicts(parts: Iterable[Logprobs], num_top: int) -> list[JsonObject | None]:
    """vLLM's form for the tokens of a prompt: by token id, of the token itself and of the `num_top` likeliest."""
    tokens = (token for part in parts for token in unpack_logprobs(narrowed(part, num_top)))
    first: list[JsonObject | None] = [None]  # which nothing came before
    return first + [{str(token_id): _ranked(each) for token_id, each in token.items()} for token in tokens]


def _ranked(logprob: Logprob) -> JsonObject:
    return {
        "logprob": max(logprob.logprob, LOWEST),
        "rank": logprob.rank,
        "decoded_token": logprob.decoded_token,
    }


def narrowed(logprobs: Logprobs, num_top: int) -> Logprobs:
    """`logprobs` with no more than `num_top` of the likeliest; -1: with all."""
    if num_top < 0 or num_top >= logprobs.num_top:
        return logprobs
    width, kept = 4 * (logprobs.num_top + 1), 4 * (num_top + 1)

    def cut(column: bytes) -> bytes:
        return b"".join(column[start : start + kept] for start in range(0, len(column), width))

    ids, values = cut(logprobs.token_ids), cut(logprobs.logprobs)
    return msgspec.structs.replace(logprobs, num_top=num_top, token_ids=ids, logprobs=values)


def _rows(logprobs: Logprobs | None, with_ids: bool) -> list[list[tuple[str, str, float]]]:
    """Per token: (how it is written, text, logprob) of itself and then of the likeliest, or of itself and the others
    that are named."""
    if logprobs is None:
        return []
    texts, rows = logprobs.texts, unpack_rows(logprobs)
    if logprobs.are_named:
        rows = [[row[0], *dict(row).items()] for row in rows]

    def token(token_id: int, value: float) -> tuple[str, str, float]:
        text = texts.get(token_id, "")
        return _name(token_id, text, with_ids), text, max(value, LOWEST)

    return [[token(*each) for each in row] for row in rows]


def _name(token_id: int, text: str, with_ids: bool) -> str:
    return f"token_id:{token_id}" if with_ids else text


def _token(name: str, text: str, logprob: float) -> JsonObject:
    return {"token": name, "logprob": logprob, "bytes": list(text.encode())}
