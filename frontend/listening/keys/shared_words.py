"""SharedWords: 64-bit numbers in a mapped file, which change together or not at all, even if their writer is killed.

One process writes the file, others read it. A change is noted at the start of the file before it is made, and the note
is cleared after it: the next writer makes the change that it finds noted. A reader may see a change half made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....ipc.sockets.addresses import map_file

MOST_CHANGES = 8  # numbers that change together
FIRST = 1 + 2 * MOST_CHANGES  # index of the first number after the note
WORD_BYTES = 8


class SharedWords:
    """The numbers of a file, all 0 at first. `words` may be read; `change` writes."""

    def __init__(self, path: Path, num_words: int) -> None:
        """ConfigError if the disk is full. If this process is to write, call `repair` first."""
        self._map = map_file(path, (FIRST + num_words) * WORD_BYTES)
        self.words = memoryview(self._map).cast("q")

    def repair(self) -> None:
        """Make the change that the writer before has left noted."""
        note = self.words[1 : 1 + 2 * self.words[0]].tolist()
        self._apply(list(zip(note[0::2], note[1::2], strict=True)))

    def change(self, changes: Sequence[tuple[int, int]]) -> None:
        """Set numbers, given as (index, value)."""
        words = self.words
        for place, (index, value) in enumerate(changes):
            words[1 + 2 * place] = index
            words[2 + 2 * place] = value
        words[0] = len(changes)
        self._apply(changes)

    def _apply(self, changes: Sequence[tuple[int, int]]) -> None:
        for index, value in changes:
            self.words[index] = value
        self.words[0] = 0
