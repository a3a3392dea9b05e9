"""Cut texts between markers, never inside one: `<…>`, `[…]`, a word, or a marker and the word behind it."""

from __future__ import annotations

import re

_OPEN = re.compile(r"<[^<>\n]{0,63}\Z|\[[^\[\]\n]{0,63}\Z")  # a marker that has begun
_CLOSED = {"<": re.compile(r"[^<>\n]{0,63}>"), "[": re.compile(r"[^\[\]\n]{0,63}\]")}
_MARKER = re.compile(r"(?:<[^<>\n]{1,63}>|\[[^\[\]\n]{1,63}\])\Z")
_WORD = re.compile(r"[\w=.:-]\Z")
_WORD_BEGIN = re.compile(r"[\w=.:-]")
_WIDTH = 64  # of the longest marker


def common_prefix(*texts: str) -> str:
    """Return the longest common prefix that ends between markers and words in each text."""
    length = num_shared(*texts)
    while length and any(_is_inside(each, length) for each in texts):
        length -= 1
    prefix = texts[0][:length]
    led = _MARKER.search(prefix[-_WIDTH - 2 :])  # a marker may lead a word: <|open|>think, <|open|>response
    if led is not None and all(_WORD_BEGIN.match(each, length) for each in texts):
        return prefix.removesuffix(led.group())
    return prefix


def common_suffix(one: str, other: str) -> str:
    """Return the longest common suffix that begins between markers and words in both texts."""
    length = num_shared(one[::-1], other[::-1])
    while length and any(_begins_inside(each, len(each) - length) for each in (one, other)):
        length -= 1
    return one[len(one) - length :]


def num_shared(*texts: str) -> int:
    """Return the number of characters that all texts begin with."""
    shortest = min(texts, key=len)
    for place, letter in enumerate(shortest):
        if any(each[place] != letter for each in texts):
            return place
    return len(shortest)


def _is_inside(text: str, place: int) -> bool:
    """Return whether a marker or a word goes on from one side of `place` to the other."""
    opened = _OPEN.search(text[max(0, place - _WIDTH) : place])
    if opened is not None and _CLOSED[opened.group()[0]].match(text, place):
        return True
    return _follows_word(text, place) and bool(_WORD_BEGIN.match(text, place))


def _begins_inside(text: str, place: int) -> bool:
    """Return whether a suffix at `place` lacks the begin of its marker: a marker behind a word belongs to the word, as
    in <|close|>tools<|sep|>."""
    return _is_inside(text, place) or _follows_word(text, place)


def _follows_word(text: str, place: int) -> bool:
    return bool(_WORD.search(text[max(0, place - 1) : place]))
