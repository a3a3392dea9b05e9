"""The tokens that an answer has shown, as words of 32 bits, for a slot.

A word below 2^31 is a token of the choice that was named last, at first choice 0. Others name a choice, say that it has
ended, with the bytes of its finish reason behind, or have the logprobs of its next token behind them, or a prompt's
number and its sources.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

WORD_BYTES = 4
_CHOICE, _SOURCES, _END, _LOGPROBS = 4 << 29, 5 << 29, 6 << 29, 7 << 29
_LARGEST = (1 << 29) - 1  # choice, or size of the bytes behind a word
WORD = struct.Struct("<I")


@dataclass
class ShownAnswer:
    """One choice of an answer, as far as the client has it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[bytes] = field(default_factory=list)  # of each token, if there are any


@dataclass
class ShownAnswers:
    """The part of an answer that its client has."""

    answers: dict[int, ShownAnswer] = field(default_factory=dict)  # by choice
    sources: dict[int, bytes] = field(default_factory=dict)  # by prompt


class TokenWriter:
    """Encoder of one answer's tokens. `choice` is the one that it has named last."""

    def __init__(self, choice: int = 0) -> None:
        self.choice = choice

    def encode(
        self,
        tokens: Sequence[tuple[int, bytes]],
        ended: Sequence[tuple[int, str]],
        logprobs: Sequence[tuple[int, bytes]] = (),
        sources: Sequence[tuple[int, bytes]] = (),
    ) -> bytes:
        """Return the words for new `tokens`, by choice, encoded as in messages, choices that have `ended`, with their
        reasons, `logprobs` of tokens in their order, and `sources` of prompts."""
        found = bytearray()
        for prompt, encoded in sources:
            _add_bytes(_SOURCES, WORD.pack(prompt) + encoded, found)
        for choice, token_ids in tokens:
            self._name(choice, found)
            found += token_ids
        for choice, reason in ended:
            self._name(choice, found)
            _add_bytes(_END, reason.encode(), found)
        for choice, encoded in logprobs:
            self._name(choice, found)
            _add_bytes(_LOGPROBS, encoded, found)
        return bytes(found)

    def _name(self, choice: int, found: bytearray) -> None:
        assert choice <= _LARGEST
        if choice != self.choice:
            self.choice = choice
            found += WORD.pack(_CHOICE | choice)


def _add_bytes(kind: int, data: bytes, found: bytearray) -> None:
    assert len(data) <= _LARGEST
    found += WORD.pack(kind | len(data)) + data + bytes(-len(data) % WORD_BYTES)


def decode(words: bytes) -> tuple[ShownAnswers, TokenWriter]:
    """Return the content of these words, and a writer that goes on after them."""
    shown = ShownAnswers()
    answers = shown.answers
    choice = place = 0
    while place < len(words):
        (word,) = WORD.unpack_from(words, place)
        place += WORD_BYTES
        if word < _CHOICE:
            answers.setdefault(choice, ShownAnswer()).token_ids.append(word)
            continue
        if word < _SOURCES:
            choice = word & _LARGEST
            continue
        length = word & _LARGEST
        data = words[place : place + length]
        place += length + -length % WORD_BYTES
        if word < _END:
            shown.sources[WORD.unpack_from(data)[0]] = data[WORD_BYTES:]
            continue
        answer = answers.setdefault(choice, ShownAnswer())
        if word < _LOGPROBS:
            answer.finish_reason = data.decode()
        else:
            answer.logprobs.append(data)
    return shown, TokenWriter(choice)
