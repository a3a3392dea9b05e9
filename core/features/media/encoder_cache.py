"""EncoderCache: the media that the workers have encoded or are encoding, by digest.

Only the core decides which entries there are. An entry is ready when the result of the step with its last piece has
come, since a medium may turn out to be damaged until then. A step that reads an entry may be in flight when the entry
is freed, since workers run steps in order. Knows no rows and no requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

from ....ipc.messages.media import MediaSpan


@dataclass(eq=False)
class Entry:
    """A medium in the workers' encoder caches."""

    number: int  # ≥ 1
    span: MediaSpan  # of the request for which its encoding was started
    begun_in: int  # number of the step with its first piece
    num_left: int  # pieces that were not sent with a step yet
    is_ready: bool = False
    num_refs: int = 0  # spans of rows that are bound to it and still to be computed
    was_used: bool = False


class EncoderCache:
    """Owner of the entries. Invariant: their embeddings together are at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forget all entries: the workers hold none any more. None may be in use."""
        self._entry_by_digest: dict[bytes, Entry] = {}  # the least recently used first
        self._free_numbers: list[int] = []  # heap, of those below _next_number
        self._next_number = 1
        self.num_used = 0  # embeddings

    def __len__(self) -> int:
        return len(self._entry_by_digest)

    def entries(self) -> list[Entry]:
        return list(self._entry_by_digest.values())

    def find(self, digest: bytes) -> Entry | None:
        return self._entry_by_digest.get(digest)

    def ready(self, digest: bytes) -> Entry | None:
        """Return the entry of a medium if rows may use it, else None."""
        entry = self._entry_by_digest.get(digest)
        return entry if entry is not None and entry.is_ready else None

    def is_pinned(self, entry: Entry) -> bool:
        """Return whether an entry must stay: rows are bound to it, or it is not ready yet."""
        return entry.num_refs > 0 or not entry.is_ready

    def begin(self, span: MediaSpan, step: int, kept: Container[bytes], num_pieces: int) -> tuple[Entry, list[int]]:
        """Make the entry of a medium that `step` starts to encode, in `num_pieces` pieces. Return the entry and the
        numbers of those freed for it, the least recently used first. kept: digests that must not be freed; the others
        must leave enough room."""
        freed = []
        for entry in self.entries():
            if self.num_used + span.num_embeds <= self.capacity:
                break
            if not self.is_pinned(entry) and entry.span.digest not in kept:
                freed.append(entry.number)
                self.remove(entry)
        assert self.num_used + span.num_embeds <= self.capacity, "the caller counts the room"
        number = heapq.heappop(self._free_numbers) if self._free_numbers else self._next_number
        self._next_number = max(self._next_number, number + 1)
        entry = self._entry_by_digest[span.digest] = Entry(number, span, step, num_pieces)
        self.num_used += span.num_embeds
        return entry, freed

    def remove(self, entry: Entry) -> None:
        """Forget an entry to which no row is bound, so that its number can be used again.

        Sends nothing: workers free an entry when its number is in a step's `freed_entries`, a failed one when the
        number is used again."""
        assert entry.num_refs == 0, "a row is bound to the entry"
        del self._entry_by_digest[entry.span.digest]
        heapq.heappush(self._free_numbers, entry.number)
        self.num_used -= entry.span.num_embeds

    def bind(self, entry: Entry) -> None:
        """Record that a span of a row will be computed from a ready entry, which stays until `release`."""
        entry.num_refs += 1
        entry.was_used = True
        self._entry_by_digest[entry.span.digest] = self._entry_by_digest.pop(entry.span.digest)

    def release(self, entry: Entry) -> None:
        entry.num_refs -= 1

    def check_invariants(self) -> None:
        """Raise AssertionError unless numbers and sizes agree with the entries."""
        entries = self.entries()
        assert self.num_used == sum(entry.span.num_embeds for entry in entries) <= self.capacity
        numbers = [entry.number for entry in entries]
        assert sorted(numbers + self._free_numbers) == list(range(1, self._next_number))
        assert all(entry.span.digest == digest for digest, entry in self._entry_by_digest.items())
        assert all(entry.num_refs == 0 or self.ready(entry.span.digest) is entry for entry in entries)
        assert sum(entry.num_left > 0 for entry in entries) <= 1, "two media are half encoded"
