"""Split an answer into reasoning and content at the markers around the reasoning."""

from __future__ import annotations

from .markers import MarkerFinder, split_marker
from .parts import Part, Thought, content

MARKERS = {  # name of --reasoning-parser → opening and closing marker
    "think": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
}
BEGIN_INSIDE = frozenset(("deepseek_r1",))  # answers start inside reasoning, without an opening marker anywhere


class ThoughtParser:
    """Parser of one answer: reasoning at its start, if any, and then content."""

    def __init__(self, name: str, *, is_open: bool) -> None:
        """`is_open`: the answer starts inside the reasoning, without an opening marker."""
        self.markers = self._opening, closing = MARKERS[name]
        self._thought = MarkerFinder(closing)
        self._is_open = is_open
        self._held: str | None = ""  # None once the opening marker was read, or can no longer come
        self._is_over = self._has_content = False  # _is_over: the reasoning has ended, or there is none

    def append(self, text: str) -> list[Part]:
        if self._is_over:
            return self._content(text)
        if self._held is not None:
            self._held += text
            split = split_marker(self._held, self._opening)
            if split is None:
                return []
            self._held, (opening, text) = None, split  # white space before the opening marker is not content
            self._is_open |= bool(opening)
            if not self._is_open:
                self._is_over = self._has_content = True
                return content(text)
        thought, closing, rest = self._thought.feed(text)
        self._is_over = bool(closing)
        return [*([Thought(thought)] if thought else []), *self._content(rest)]

    def finish(self) -> list[Part]:
        held = self._held or self._thought.finish()
        return [Thought(held)] if held and self._is_open else content(held)

    def _content(self, text: str) -> list[Part]:
        """Return text after the reasoning as content, without the line breaks between the two."""
        text = text if self._has_content else text.lstrip("\n")
        self._has_content |= bool(text)
        return content(text)


def ends_inside(prompt: str, *, is_continued: bool = False) -> bool:
    """Return whether the prompt shows that the answer starts inside reasoning: it ends with any parser's opening
    marker, and white space at most.

    `is_continued`: the answer continues the last turn, so that the reasoning may have started anywhere in the prompt.
    Otherwise earlier markers do not count, since a user may have written them."""
    if is_continued:
        return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in MARKERS.values())
    return prompt.rstrip().endswith(tuple(opening for opening, _ in MARKERS.values()))
