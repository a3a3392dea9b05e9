"""ReasoningSplitter: an answer's text → what the model thought and what it says, as the text comes.

Models mark their thoughts with <think>…</think>; with some the template has opened the first marker already. Text that
may be the beginning of a marker is held back until it is decided.
"""

from __future__ import annotations

OPENING, CLOSING = "<think>", "</think>"


class ReasoningSplitter:
    """`append` and `finish` return (reasoning, content)."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends inside a thought."""
        self._is_open = is_open
        self._is_over = False  # the thought has ended: the rest is content
        self._held = ""
        self._at_start = not is_open

    def append(self, text: str) -> tuple[str, str]:
        if self._is_over:
            return "", text
        self._held += text
        if self._at_start and not self._open():
            return "", self._take_if_over()
        return self._think()

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self._is_open else ("", held)

    def _open(self) -> bool:
        """Whether the answer has begun with the opening marker; white space before it is no content."""
        stripped = self._held.lstrip()
        if stripped.startswith(OPENING):
            self._held = stripped.removeprefix(OPENING)
            self._at_start, self._is_open = False, True
            return True
        if not OPENING.startswith(stripped):
            self._is_over = True
        return False

    def _take_if_over(self) -> str:
        if not self._is_over:
            return ""
        held, self._held = self._held, ""
        return held

    def _think(self) -> tuple[str, str]:
        reasoning, marker, content = self._held.partition(CLOSING)
        if marker:
            self._is_open, self._is_over, self._held = False, True, ""
            return reasoning, content.lstrip("\n")
        num_held = held_back(self._held, CLOSING)
        reasoning, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return reasoning, ""


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)


def has_markers(template: str) -> bool:
    return CLOSING in template or OPENING in template


def ends_inside(prompt: str) -> bool:
    """Whether a prompt leaves a thought open."""
    return prompt.rfind(OPENING) > prompt.rfind(CLOSING)
