"""The tokens that an answer has shown, as words of 32 bits, for a slot.

A word below 2^31 is a token of the choice that was named last, at first choice 0. Others name a choice, or say that it
has ended, with the bytes of its finish reason behind.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

WORD_BYTES = 4
_CHOICE, _END = 1 << 31, 3 << 30
_LARGEST = (1 << 30) - 1
_WORD = struct.Struct("<I")


@dataclass
class ShownAnswer:
    """One choice of an answer, as far as the client has it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class TokenWriter:
    """Encoder of one answer's tokens. It remembers the choice that it has named last."""

    def __init__(self, choice: int = 0) -> None:
        self._choice = choice

    def encode(self, tokens: Sequence[tuple[int, int]], ended: Sequence[tuple[int, str]]) -> bytes:
        """Return the words for new `tokens`, by choice, and choices that have `ended`, with their reasons."""
        if len(tokens) == 1 and not ended and tokens[0][0] == self._choice:  # nearly always, and faster
            return _WORD.pack(tokens[0][1])
        found = bytearray()
        for choice, token_id in tokens:
            self._name(choice, found)
            found += _WORD.pack(token_id)
        for choice, reason in ended:
            self._name(choice, found)
            text = reason.encode()
            found += _WORD.pack(_END | len(text)) + text + bytes(-len(text) % WORD_BYTES)
        return bytes(found)

    def _name(self, choice: int, found: bytearray) -> None:
        assert choice <= _LARGEST
        if choice != self._choice:
            self._choice = choice
            found += _WORD.pack(_CHOICE | choice)


def decode(words: bytes) -> tuple[dict[int, ShownAnswer], TokenWriter]:
    """Return the shown tokens of each choice, and a writer that goes on after these words."""
    answers: dict[int, ShownAnswer] = {}
    choice = place = 0
    while place < len(words):
        (word,) = _WORD.unpack_from(words, place)
        place += WORD_BYTES
        if word < _CHOICE:
            answers.setdefault(choice, ShownAnswer()).token_ids.append(word)
        elif word < _END:
            choice = word & _LARGEST
        else:
            length = word & _LARGEST
            answers.setdefault(choice, ShownAnswer()).finish_reason = words[place : place + length].decode()
            place += length + -length % WORD_BYTES
    return answers, TokenWriter(choice)
