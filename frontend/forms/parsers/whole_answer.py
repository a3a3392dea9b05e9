"""WholeCalls: reads an answer as calls only if it consists of calls.

For forms whose calls begin with a text that any answer may hold, such as a bracket.
"""

from __future__ import annotations

from collections.abc import Iterable

from .parts import CallEnd, Content, Parser, Part, UnreadCall, content, whole_calls


class WholeCalls:
    """Parser of one answer: holds the parts of another parser until the end. If they have content, or a call that is
    none, the whole answer is content."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._held: list[str] = []
        self._parts: list[Part] = []
        self._is_content = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self._parser.markers

    def append(self, text: str) -> list[Part]:
        if self._is_content:
            return content(text)
        self._held.append(text)
        return self._read(self._parser.append(text))

    def finish(self) -> list[Part]:
        if self._is_content:
            return []
        if said := self._read(self._parser.finish()):
            return said
        num_calls = sum(isinstance(part, CallEnd) for part in self._parts)
        is_whole = num_calls > 0 and len(whole_calls(self._parts)[1]) == num_calls
        if not is_whole:
            return content("".join(self._held))
        return self._parts

    def _read(self, parts: Iterable[Part]) -> list[Part]:
        unread = ""
        for part in parts:
            if not isinstance(part, Content):
                self._parts.append(part)
            elif part.text.strip():
                if isinstance(part, UnreadCall) and not self._is_content:
                    unread = part.text
                self._is_content = True
        if not self._is_content:
            return []
        self._parts = []
        held = "".join(self._held)
        if not unread:
            return content(held)
        end = held.index(unread) + len(unread)
        return [UnreadCall(held[:end]), *content(held[end:])]
