"""Format logprobs: OpenAI's columns for completions, OpenAI's objects for chats, vLLM's dicts for prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import Delta, Logprobs
from ...client.logprobs import Logprob, TokenLogprobs, unpack_logprobs, unpack_rows
from ...text.token_bytes import UNDECODABLE

TokenBytes: TypeAlias = Callable[[int], bytes]  # of a token id
LOWEST = -9999.0  # stands for −∞, which JSON lacks; OpenAI's value


class CompletionLogprobs:
    """Builder of the columns {tokens, token_logprobs, top_logprobs, text_offset} of one choice."""

    def __init__(self, *, with_ids: bool = False) -> None:
        """`with_ids`: write tokens as token_id:ID instead of text."""
        self._with_ids = with_ids
        self._offset = 0  # of the next token, in characters of the choice's text
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_first(self, token_id: int, text: str) -> None:
        """Add the first token of an echoed prompt, which has no logprob."""
        self._add(_name(token_id, text, self._with_ids), text, None, None)

    def add(self, logprobs: Logprobs | None) -> None:
        for tokens in _rows(logprobs, self._with_ids):
            first = {tokens[0].name: tokens[0].logprob}
            top = {each.name: each.logprob for each in reversed(tokens[1:])}  # tokens of one name: the likeliest
            self._add(tokens[0].name, tokens[0].text, tokens[0].logprob, first | top | first)

    def _add(self, name: str, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._rows.append((name, logprob, top, self._offset))
        self._offset += len(text)

    def take(self) -> JsonObject:
        """Return the columns of the tokens that were added since the last call."""
        rows, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def chat_logprobs(delta: Delta, token_bytes: TokenBytes, *, with_ids: bool = False) -> list[JsonObject]:
    """Return one object per token of the delta: the token and the likeliest, or the named ones, at its position.

    `with_ids`: write tokens as token_id:ID; only `bytes` has their text."""

    def shown(token: _Token) -> JsonObject:
        return token_logprob(token.token_id, token.text, token.logprob, token_bytes) | {"token": token.name}

    return [
        shown(tokens[0]) | {"top_logprobs": [shown(each) for each in tokens[1:]]}
        for tokens in _rows(delta.logprobs, with_ids)
    ]


def token_logprob(token_id: int, text: str, logprob: float, token_bytes: TokenBytes) -> JsonObject:
    """Return OpenAI's object of one token. `bytes` of consecutive tokens join to whole characters, `token` may not."""
    shown = token_bytes(token_id) if UNDECODABLE in text else text.encode()
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(shown)}


def prompt_logprob_dicts(parts: Iterable[Logprobs], num_top: int) -> list[TokenLogprobs | None]:
    """Return vLLM's prompt_logprobs: None for the first token, for others a dict of the token itself and the `num_top`
    likeliest (-1: all)."""
    tokens = (token for part in parts for token in unpack_logprobs(narrowed(part, num_top)))
    first: list[TokenLogprobs | None] = [None]  # the first token has no logprob
    return first + [{token_id: _finite(each) for token_id, each in token.items()} for token in tokens]


def _finite(logprob: Logprob) -> Logprob:
    return msgspec.structs.replace(logprob, logprob=max(logprob.logprob, LOWEST))


def narrowed(logprobs: Logprobs, num_top: int) -> Logprobs:
    """Keep at most the `num_top` likeliest tokens per position beside the token itself; -1 keeps all."""
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
    """Return per position the sampled token and then the likeliest ones.

    If the request named tokens (logprob_token_ids), the sampled token once more and the named ones come in place of
    the likeliest. `with_ids`: a token's name is its id."""
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
