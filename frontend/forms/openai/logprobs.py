"""Format logprobs: OpenAI's columns for completions, OpenAI's objects for chats, vLLM's dicts for prompts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import Delta, Logprobs
from ..logprobs import UNDECODABLE, Logprob, TokenLogprobs, unpack_logprobs, unpack_rows

TokenBytes: TypeAlias = Callable[[int], bytes]  # returns the bytes of a token id
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs")
LOWEST = -9999.0  # stands for −∞, which JSON lacks; OpenAI's value


class TokenOffsets(Protocol):
    """Interface of the offsets of one text's tokens, in characters."""

    def next(self, token_id: int) -> int:
        """Return the offset of the next token of the text."""


class CompletionLogprobs:
    """Builder of the columns {tokens, token_logprobs, top_logprobs, text_offset} of one choice."""

    def __init__(self, in_prompt: TokenOffsets, in_answer: TokenOffsets, *, with_ids: bool = False) -> None:
        """`with_ids`: write tokens as token_id:ID instead of text."""
        self._in_prompt, self._in_answer, self._with_ids = in_prompt, in_answer, with_ids
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_first(self, token_id: int, text: str) -> None:
        """Add the first token of an echoed prompt, which has no logprob."""
        self._rows.append((_name(token_id, text, self._with_ids), None, None, self._in_prompt.next(token_id)))

    def add_prompt(self, parts: Iterable[Logprobs | None]) -> None:
        """Add the next tokens of an echoed prompt."""
        self._add(parts, self._in_prompt)

    def add(self, parts: Iterable[Logprobs | None]) -> None:
        """Add the next tokens of the answer."""
        self._add(parts, self._in_answer)

    def _add(self, parts: Iterable[Logprobs | None], offsets: TokenOffsets) -> None:
        for tokens in chain.from_iterable(_rows(part, self._with_ids) for part in parts):
            own = tokens[0]
            first = {own.name: own.logprob}
            top = {each.name: each.logprob for each in reversed(tokens[1:])}  # tokens of one name: the likeliest
            self._rows.append((own.name, own.logprob, first | top | first, offsets.next(own.token_id)))

    def take(self, num_characters: int, *, is_last: bool) -> JsonObject:
        """Return, once, the columns of the added tokens whose offset in the choice's text is at most `num_characters`,
        the length of the text that the caller may send.

        Later tokens wait, since their text may become a stop string. If `is_last`, all tokens are returned; those whose
        text was cut off have the end of the text as their offset.
        """
        offset = itemgetter(3)
        count = len(self._rows) if is_last else bisect_right(self._rows, num_characters, key=offset)
        rows, self._rows = self._rows[:count], self._rows[count:]
        columns: JsonObject = {name: [row[column] for row in rows] for column, name in enumerate(_COLUMNS)}
        return columns | {"text_offset": [min(offset(row), num_characters) for row in rows]}


def chat_logprobs(delta: Delta, token_bytes: TokenBytes, *, with_ids: bool = False) -> list[JsonObject]:
    """Return one object per token of the delta: the token, and the likeliest or the requested tokens at its position.

    `with_ids`: write tokens as token_id:ID, so that only `bytes` has their text."""

    def shown(token: _Token) -> JsonObject:
        return token_logprob(token.token_id, token.text, token.logprob, token_bytes) | {"token": token.name}

    return [
        shown(tokens[0]) | {"top_logprobs": [shown(each) for each in tokens[1:]]}
        for tokens in _rows(delta.logprobs, with_ids)
    ]


def token_logprob(token_id: int, text: str, logprob: float, token_bytes: TokenBytes) -> JsonObject:
    """Return OpenAI's object for one token. `token` has U+FFFD for a part of a character; `bytes` are then the token's
    own bytes, which make whole characters with those of its neighbours."""
    shown = token_bytes(token_id) if UNDECODABLE in text else text.encode()
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(shown)}


def prompt_logprob_dicts(parts: Iterable[Logprobs], num_top: int) -> list[TokenLogprobs | None]:
    """Return vLLM's prompt_logprobs: None for the first token, for each other token a dict with the token itself and
    the `num_top` likeliest (-1: all that `parts` have)."""
    tokens = (token for part in parts for token in unpack_logprobs(narrowed(part, num_top)))
    first: list[TokenLogprobs | None] = [None]  # the first token has no logprob
    return first + [{token_id: _finite(each) for token_id, each in token.items()} for token in tokens]


def _finite(logprob: Logprob) -> Logprob:
    return msgspec.structs.replace(logprob, logprob=max(logprob.logprob, LOWEST))


def narrowed(logprobs: Logprobs, num_top: int) -> Logprobs:
    """Return logprobs with at most the `num_top` likeliest tokens per position besides the token itself; -1 keeps
    all."""
    if num_top < 0 or num_top >= logprobs.num_top:
        return logprobs
    width, kept = 4 * (logprobs.num_top + 1), 4 * (num_top + 1)

    def cut(column: bytes) -> bytes:
        return b"".join(column[start : start + kept] for start in range(0, len(column), width))

    ids, values = cut(logprobs.token_ids), cut(logprobs.logprobs)
    return msgspec.structs.replace(logprobs, num_top=num_top, token_ids=ids, logprobs=values)


class _Token(NamedTuple):
    token_id: int
    name: str
    text: str
    logprob: float


def _rows(logprobs: Logprobs | None, with_ids: bool) -> list[list[_Token]]:
    """Return, for each position, the sampled token and then the likeliest ones.

    If the request has logprob_token_ids, the sampled token (again) and those tokens replace the likeliest. `with_ids`:
    a token's name is token_id:ID."""
    if logprobs is None:
        return []
    texts, rows = logprobs.texts, unpack_rows(logprobs)
    if logprobs.are_named:
        rows = [[row[0], *dict(row).items()] for row in rows]

    def token(token_id: int, value: float) -> _Token:
        text = texts.get(token_id, "")
        return _Token(token_id, _name(token_id, text, with_ids), text, max(value, LOWEST))

    return [[token(*each) for each in row] for row in rows]


def _name(token_id: int, text: str, with_ids: bool) -> str:
    return f"token_id:{token_id}" if with_ids else text
