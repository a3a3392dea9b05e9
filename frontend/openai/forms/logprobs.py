"""Log probabilities in the two forms that OpenAI gives them: columns for completions, objects for chats."""

from __future__ import annotations

from ....ipc.codec import JsonObject
from ....ipc.messages.client import Delta, Logprobs
from ...client.logprobs import rows_of

LOWEST = -9999.0  # JSON has no −∞; OpenAI writes this


class CompletionLogprobs:
    """The columns {tokens, token_logprobs, top_logprobs, text_offset}; `take` gives what was added since the last."""

    def __init__(self) -> None:
        self._offset = 0  # in characters of the choice's text
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_first(self, text: str) -> None:
        """The first token of an echoed prompt, which nothing came before."""
        self._add(text, None, None)

    def add(self, logprobs: Logprobs | None) -> None:
        for tokens in _rows(logprobs):
            text, logprob = tokens[0]
            self._add(text, logprob, dict(reversed(tokens[1:])) | {text: logprob})

    def _add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._rows.append((text, logprob, top, self._offset))
        self._offset += len(text)

    def take(self) -> JsonObject:
        rows, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def chat_logprobs(delta: Delta) -> list[JsonObject]:
    """One object for each token of the delta: the token itself and the likeliest at its place."""
    return [
        _token(*tokens[0]) | {"top_logprobs": [_token(*each) for each in tokens[1:]]}
        for tokens in _rows(delta.logprobs)
    ]


def _rows(logprobs: Logprobs | None) -> list[list[tuple[str, float]]]:
    """Per token: (text, logprob) of itself and then of the likeliest."""
    if logprobs is None:
        return []
    texts = logprobs.texts
    return [[(texts.get(token_id, ""), max(value, LOWEST)) for token_id, value in row] for row in rows_of(logprobs)]


def _token(text: str, logprob: float) -> JsonObject:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
