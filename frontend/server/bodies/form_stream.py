"""FormStream: splits a form that comes in pieces and is not kept, with the rules and errors of `form_data.py`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TypeAlias

from .form_data import (
    CRLF,
    MAX_HEAD_BYTES,
    MAX_PADDING_BYTES,
    MAX_PARTS,
    PartHead,
    cut_form,
    long_head,
    many_parts,
    no_boundary,
    part_head,
    stray_boundary,
)

Event: TypeAlias = PartHead | bytes  # the begin of a part, or further bytes of its content


class Place(enum.Enum):
    """The part of a form to which its next byte belongs."""

    PREAMBLE = enum.auto()
    BOUNDARY = enum.auto()  # the rest of the line of a boundary
    HEAD = enum.auto()
    START = enum.auto()  # the first bytes behind a head, which may be a boundary already
    CONTENT = enum.auto()
    END = enum.auto()


class FormStream:
    """Splitter of one form. Holds at most a head, or the bytes that may be the begin of a boundary."""

    def __init__(self, boundary: str) -> None:
        self._delimiter = CRLF + b"--" + boundary.encode()
        self._held = bytearray(CRLF)  # so that a form may begin with a boundary
        self._place = Place.PREAMBLE
        self._num_bytes = self._num_parts = 0
        self._name = ""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events of the next bytes; BodyError if the form is not well-formed or has too many parts."""
        self._num_bytes += len(data)
        self._held += data
        has_more = True
        while has_more:
            if self._place is Place.END:
                self._held.clear()
                return
            if self._place is Place.HEAD:
                head = self._take_head()
                has_more = head is not None
                if head is not None:
                    yield head
            elif self._place is Place.CONTENT:
                content = self._take_content()
                has_more = self._place is not Place.CONTENT
                if content:
                    yield content
            else:
                has_more = self._pass_boundary()

    def finish(self) -> None:
        """Raise BodyError unless the form has ended."""
        if self._place is Place.PREAMBLE:
            raise no_boundary(self._num_bytes)
        if self._place is not Place.END:
            in_content = self._place in (Place.START, Place.CONTENT)
            raise cut_form(self._num_bytes, self._num_parts - in_content, self._name if in_content else "")

    def _pass_boundary(self) -> bool:
        """Go on outside of heads and contents; return whether the place is another one now."""
        held, delimiter = self._held, self._delimiter
        if self._place is Place.PREAMBLE:
            found = held.find(delimiter)
            if found < 0:
                del held[: 1 - len(delimiter)]
                return False
            del held[: found + len(delimiter)]
            self._place = Place.BOUNDARY
            return True
        if self._place is Place.START:
            if held.startswith(delimiter):
                del held[: len(delimiter)]
                self._place = Place.BOUNDARY
                return True
            if len(held) < len(delimiter) and delimiter.startswith(held):
                return False
            del held[: len(CRLF)]
            self._place = Place.CONTENT
            return True
        return self._pass_line()

    def _pass_line(self) -> bool:
        """Pass the rest of a boundary's line, but for its end, with which a head begins."""
        held = self._held
        if len(held) < 2:
            return False
        if held.startswith(b"--"):
            self._place = Place.END
            return True
        if self._num_parts == MAX_PARTS:
            raise many_parts()
        line_end = held.find(CRLF, 0, MAX_PADDING_BYTES)
        if line_end < 0 and len(held) < MAX_PADDING_BYTES:
            return False
        if line_end < 0 or held[:line_end].strip(b" \t"):
            raise stray_boundary(self._num_parts)
        del held[:line_end]
        self._place = Place.HEAD
        return True

    def _take_head(self) -> PartHead | None:
        head_end = self._held.find(CRLF + CRLF, 0, MAX_HEAD_BYTES)
        if head_end < 0:
            if len(self._held) < MAX_HEAD_BYTES:
                return None
            raise long_head(self._num_parts + 1)
        head = part_head(bytes(self._held[:head_end]), self._num_parts + 1)
        del self._held[: head_end + len(CRLF)]
        self._num_parts += 1
        self._name = head.name
        self._place = Place.START
        return head

    def _take_content(self) -> bytes:
        """Return the bytes that belong to the content for sure, and pass a boundary behind them."""
        held, delimiter = self._held, self._delimiter
        found = held.find(delimiter)
        if found < 0:
            end = max(len(held) - len(delimiter) + 1, 0)
            content = bytes(held[:end])
            del held[:end]
            return content
        content = bytes(held[:found])
        del held[: found + len(delimiter)]
        self._place = Place.BOUNDARY
        return content
