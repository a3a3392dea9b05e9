"""Split an answer into thought and content at the markers around the thought."""

from __future__ import annotations

from .markers import MarkerFinder, split_marker
from .parts import Part, Thought, content

MARKERS = {  # by name of --reasoning-parser
    "think": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
}
BEGIN_INSIDE = frozenset(("deepseek_r1",))  # answers begin with a thought that neither they nor the prompt open


class ThoughtParser:
    """Parser of one answer: at most one thought, at its begin, and then content."""

    def __init__(self, name: str, *, is_open: bool) -> None:
        """`is_open`: the answer begins inside the thought, without an opening marker."""
        self.markers = self._opening, closing = MARKERS[name]
        self._thought = MarkerFinder(closing)
        self._is_open = is_open
        self._held: str | None = ""  # until the opening marker has come, or can no longer come; then None
        self._is_over = self._has_content = False  # the thought has ended

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
        """Return text after the thought as content, without the line breaks between the two."""
        text = text if self._has_content else text.lstrip("\n")
        self._has_content |= bool(text)
        return content(text)


def ends_inside(prompt: str, *, is_continued: bool = False) -> bool:
    """Return whether the answer begins inside a thought: the prompt ends with any parser's opening marker.

    `is_continued`: the answer continues the last turn, and the thought may have begun anywhere in the prompt. Otherwise
    earlier markers do not count: a user may have written them."""
    if is_continued:
        return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in MARKERS.values())
    return prompt.rstrip().endswith(tuple(opening for opening, _ in MARKERS.values()))
