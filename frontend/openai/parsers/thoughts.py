"""Split an answer into thought and content at the markers around the thought."""

from __future__ import annotations

from .parts import MarkedText, Part, Thought, content

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
        """`is_open`: the prompt ends inside the thought, as some chat templates open it."""
        self._opening, self._closing = MARKERS[name]
        self._is_open = is_open
        self._has_begun = False  # the opening marker has come, or can no longer come
        self._is_over = self._has_content = False  # the thought has ended
        self._text = MarkedText()

    def append(self, text: str) -> list[Part]:
        if self._is_over:
            return self._content(text)
        self._text.held += text
        if not self._has_begun:
            begun = self._text.held.lstrip()  # white space before the opening marker is not content
            if self._opening.startswith(begun[: len(self._opening)]) and len(begun) < len(self._opening):
                return []
            self._has_begun = True
            if begun.startswith(self._opening):
                self._is_open, self._text.held = True, begun.removeprefix(self._opening)
            elif not self._is_open:
                self._is_over = self._has_content = True
                return content(self._text.take())
        thought, marker = self._text.until(self._closing)
        parts: list[Part] = [Thought(thought)] if thought else []
        if marker:
            self._is_over = True
            parts += self._content(self._text.take())
        return parts

    def finish(self) -> list[Part]:
        held = self._text.take()
        return [Thought(held)] if held and self._is_open else content(held)

    def _content(self, text: str) -> list[Part]:
        """Return text after the thought as content, without the line breaks between the two."""
        text = text if self._has_content else text.lstrip("\n")
        self._has_content |= bool(text)
        return content(text)


def ends_inside(prompt: str, *, is_continued: bool = False) -> bool:
    """Return whether the answer begins inside a thought: the prompt ends with an opening marker.

    `is_continued`: the answer continues the last turn, and the thought may have begun anywhere in the prompt. Otherwise
    earlier markers do not count: a user may have written them."""
    if is_continued:
        return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in MARKERS.values())
    return prompt.rstrip().endswith(tuple(opening for opening, _ in MARKERS.values()))
