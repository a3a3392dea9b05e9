"""PieceAnswer: the growing answer to one piece of a clip: its transcript, and its tokens if they have logprobs."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ....ipc.messages.base import FinishReason
from ....ipc.messages.client import Delta
from ..logprobs import unpack_rows
from .prompts import SPECIAL, AnswerReader, Spoken


class Token(NamedTuple):
    """A token of an answer. `place`: the number of the answer's characters before it. It is exact at the start of a
    delta and at special tokens; elsewhere it is an estimate if several tokens make one character."""

    place: int
    token_id: int
    text: str
    logprob: float


class PieceAnswer:
    """The text and the tokens of one answer."""

    def __init__(self, reader: AnswerReader, left_out: Collection[int] = ()) -> None:
        """`left_out`: ids of tokens that end an answer and do not belong to it."""
        self.reader, self._left_out = reader, left_out
        self.text = ""  # the whole answer so far
        self.tokens: list[Token] = []
        self.finish_reason: FinishReason | None = None
        self._shown: list[str] = []  # text of the transcript that was not taken yet
        self._num_taken = 0  # tokens that were taken

    def add(self, delta: Delta) -> None:
        self._add_tokens(delta)
        self.text += delta.text
        self._shown.append(self.reader.append(delta.text))
        if delta.finish_reason is not None:
            self._shown.append(self.reader.finish())
            self.finish_reason = delta.finish_reason

    def _add_tokens(self, delta: Delta) -> None:
        if delta.logprobs is None:
            return
        texts = delta.logprobs.texts
        answer, place = self.text + delta.text, len(self.text)
        exact, first = place, len(self.tokens)  # the last exact place, and the first token after it
        for (token_id, logprob), *_ in unpack_rows(delta.logprobs):
            text = texts.get(token_id, "")
            if token_id in self._left_out:
                continue
            if SPECIAL.fullmatch(text) and (found := answer.find(text, exact)) >= 0:
                self._keep_before(first, max(exact, found - 1))
                place, exact, first = found, found + len(text), len(self.tokens) + 1
            self.tokens.append(Token(place, token_id, text, logprob))
            place = min(place + len(text), len(answer))

    def _keep_before(self, first: int, last_place: int) -> None:
        """Cap the `place` of each token from index `first` on at `last_place`."""
        self.tokens[first:] = [token._replace(place=min(token.place, last_place)) for token in self.tokens[first:]]

    def take(self) -> str:
        """Return the transcript's text since the last call."""
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def take_tokens(self) -> list[Token]:
        """Return the transcript's tokens since the last call. Call it only after `take` has returned text, since the
        start of the transcript is unknown until then."""
        new = self.tokens[self._num_taken :]
        self._num_taken = len(self.tokens)
        return [token for token in new if token.place >= self.reader.begin]

    def spoken(self, duration_s: float) -> list[Spoken]:
        """Return the parts of the transcript with their times; if the answer has no times, one part of `duration_s`."""
        begin = self.reader.begin
        return self.reader.spoken() or [Spoken(self.text[begin:], begin, len(self.text), 0.0, duration_s)]
