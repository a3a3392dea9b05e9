"""Offsets of tokens in a text, in characters: those of an answer's tokens, and those of an echoed prompt before it.

Tokens that are parts of one character have its offset. A token without text has the offset of the next token.
"""

from __future__ import annotations

from typing import Protocol

from ....ipc.codec import decode_ids
from ...forms.openai.logprobs import TokenOffsets
from .detokenizer import Detokenizer, DetokenizerFactory

_CONTINUATION = range(0x80, 0xC0)  # the bytes of a UTF-8 character after its first


class TextStyle(Protocol):
    """Settings of an answer's text; None means the default, true."""

    @property
    def skip_special_tokens(self) -> bool | None: ...

    @property
    def spaces_between_special_tokens(self) -> bool | None: ...


def prompt_offsets(factory: DetokenizerFactory | None, text: str | None) -> TokenOffsets:
    """Return the offsets of a prompt's tokens in `text`, from which the tokens were made. None: in the text that they
    decode to."""
    if factory is None:
        return NoOffsets()
    if text is None:
        return DetokenizedOffsets(factory.new([], skip_special_tokens=False))
    return TokenizedOffsets(text, factory)


def answer_offsets(
    factory: DetokenizerFactory | None, prompt_token_ids: bytes, style: TextStyle, start: int
) -> TokenOffsets:
    """Return the offsets of an answer's tokens. `start`: the number of characters of text before the answer."""
    if factory is None:
        return NoOffsets()
    skips, spaces = style.skip_special_tokens is not False, style.spaces_between_special_tokens is not False
    return DetokenizedOffsets(factory.new(decode_ids(prompt_token_ids), skips, spaces), start)


class NoOffsets:
    """Offsets if there is no tokenizer and therefore no text: all are 0."""

    def next(self, token_id: int) -> int:
        return 0


class DetokenizedOffsets:
    """Offsets in the text to which `detokenizer`, a new one, decodes the tokens, after `start` characters."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer, self._offset = detokenizer, start

    def next(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.append(token_id))
        return offset


class TokenizedOffsets:
    """Offsets in the text from which the tokens were made. The text may lack special tokens that the tokenizer has
    added, and the space that it has put before the first word."""

    def __init__(self, text: str, factory: DetokenizerFactory) -> None:
        self._data, self._factory = text.encode(), factory
        self._place = self._num_begun = 0  # number of bytes, and of characters that begin in them

    def next(self, token_id: int) -> int:
        begin, data = self._place, self._data
        is_inside = begin < len(data) and data[begin] in _CONTINUATION
        offset = self._num_begun - is_inside
        self._place = self._end(token_id)
        self._num_begun += sum(byte not in _CONTINUATION for byte in data[begin : self._place])
        return offset

    def _end(self, token_id: int) -> int:
        """Return the byte position at which the next token ends."""
        piece = self._factory.texts.bytes_of(token_id)
        for each in (piece, piece.removeprefix(b" ")):
            if self._data.startswith(each, self._place):
                return self._place + len(each)
        if token_id in self._factory.special_ids:
            return self._place
        return min(self._place + len(piece), len(self._data))  # a normalizer has changed the text
