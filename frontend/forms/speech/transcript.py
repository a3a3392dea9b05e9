"""Transcript: the answers to the pieces of a clip, joined in order.

Knows times and texts, neither requests nor formats. Pieces may be answered in any order; `take` returns their texts in
the clip's order.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from ....ipc.messages.client import Delta
from .languages import Language
from .piece_answer import PieceAnswer, Token
from .prompts import AnswerReader

# Characters of scripts that have no blanks between words: Thai, Lao, Burmese, Khmer, and the ideographs and syllables
# of Chinese and Japanese with their punctuation.
_WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31f0-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
)


class PieceTimes(Protocol):
    """The start and the end of a piece in its clip, in seconds."""

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


class Segment(NamedTuple):
    """A part of a transcript, from `start_s` to `end_s` seconds in the clip."""

    start_s: float
    end_s: float
    text: str
    tokens: Sequence[Token]  # empty if logprobs were not requested

    @property
    def mean_logprob(self) -> float:
        """The mean of the tokens' finite logprobs; 0 without any."""
        finite = [token.logprob for token in self.tokens if math.isfinite(token.logprob)]
        return sum(finite) / len(finite) if finite else 0.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text divided by its bytes after compression with zlib: high for repetitive texts."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


class Transcript:
    """The answers to the pieces of one clip, and the text that was taken from them so far."""

    def __init__(
        self, pieces: Sequence[PieceTimes], new_reader: Callable[[], AnswerReader], left_out: Collection[int] = ()
    ) -> None:
        """`left_out`: ids of tokens that end answers and do not belong to them."""
        self._pieces = pieces
        self._answers = [PieceAnswer(new_reader(), left_out) for _ in pieces]
        self._texts: list[str] = []  # texts that were taken
        self._place = 0  # index of the piece that is being taken
        self._has_begun = False  # whether some text of that piece was taken
        self._blanks = ""  # blanks of that piece that precede its next text

    @property
    def duration_s(self) -> float:
        return self._pieces[-1].end_s if self._pieces else 0.0

    @property
    def text(self) -> str:
        """All text that was taken."""
        return "".join(self._texts)

    @property
    def language(self) -> Language | None:
        """The language that the answers name, the one with the longest time if there are several; None if there is
        none."""
        seconds = Counter[Language]()
        for piece, answer in zip(self._pieces, self._answers, strict=True):
            if answer.reader.language is not None:
                seconds[answer.reader.language] += max(1, round(1000 * (piece.end_s - piece.start_s)))
        return max(seconds, key=seconds.__getitem__) if seconds else None

    def add(self, place: int, delta: Delta) -> None:
        """Add the next output of the answer to the piece at `place`."""
        self._answers[place].add(delta)

    def take(self) -> tuple[str, list[Token]]:
        """Return the new text up to the end of the first unfinished answer, and its tokens."""
        taken, tokens = "", list[Token]()
        while self._place < len(self._answers):
            answer = self._answers[self._place]
            if text := self._stripped(answer.take()):
                taken += text if self._has_begun else joint((taken or self._last)[-1:], text) + text
                self._has_begun = True
                tokens += answer.take_tokens()
            if answer.finish_reason is None:
                break
            self._place, self._has_begun, self._blanks = self._place + 1, False, ""
        if taken:
            self._texts.append(taken)
        return taken, tokens

    @property
    def _last(self) -> str:
        return self._texts[-1] if self._texts else ""

    def _stripped(self, text: str) -> str:
        """Return the next text of a piece without blanks at the piece's start. Blanks at the end are held back until
        more text follows."""
        text = self._blanks + text if self._has_begun else text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :] if shown or self._has_begun else ""
        return shown

    def segments(self) -> Iterator[Segment]:
        """Yield the parts of the finished transcript that have text."""
        for piece, answer in zip(self._pieces, self._answers, strict=True):
            for spoken in answer.spoken(piece.end_s - piece.start_s):
                text = spoken.text.strip()
                tokens = [token for token in answer.tokens if spoken.begin <= token.place < spoken.end]
                if text:  # times may be after the end of a piece, in the silence that fills the model's window
                    start_s, end_s = (min(piece.start_s + each, piece.end_s) for each in (spoken.start_s, spoken.end_s))
                    yield Segment(start_s, end_s, text, tokens)


def joint(before: str, text: str) -> str:
    """Return the text to insert between two pieces: a blank, or nothing at the transcript's start and in scripts
    without blanks between words. `before`: the last character before; `text`: the next piece's text."""
    return "" if not before or _WITHOUT_BLANKS.match(before) or _WITHOUT_BLANKS.match(text) else " "
