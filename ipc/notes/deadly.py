"""Deadly requests: each frontend's note of the requests that it works on, and the keys of those that ended two
frontends.

    IDENTITY.reading    key of the request that the frontend's event loop works on, then one key for each of its threads
    deadly              seed u64 │ number of keys ever u64 │ key 1 │ key 2 │ …    a key: 16 bytes, zeros for none

A frontend writes the key of a request into its note before it works on it, with plain stores to a mapped file, so that
no kind of death loses the note. If a frontend ends by itself or hangs, the supervisor reads its note; a key that it
finds in the notes of two such frontends goes into `deadly`, and all frontends refuse requests with that key. A repeated
request has the same key: a hash of a client's identity and the id of its request or query, or of an HTTP request's
method, path and body.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Coroutine, Generator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from xxhash import xxh3_128, xxh3_128_digest

from ..sockets.addresses import map_file

T = TypeVar("T")

logger = logging.getLogger("tokenloom.supervisor")

KEY_BYTES, NUM_SLOTS = 16, 8
NONE = bytes(KEY_BYTES)
LOSSES_TO_REFUSE = 2  # the first may have had another cause
MAX_KEYS = 1024  # a further key replaces the oldest
_WORD, _HEAD_BYTES = 8, 16
FILE_NAME = "deadly"
REFUSAL = (
    f"{LOSSES_TO_REFUSE} frontends have ended while they worked on this request, so it is refused until the engine is "
    "started again: change it, and report it with the engine's log"
)


class ReadingNote:
    """Note of the requests that a frontend works on, and its view of the requests that it must refuse.

    `current`: key of the event loop's request, NONE if there is none. The loop calls all methods but `hold`, with which
    a thread writes its own slot."""

    def __init__(self, run_directory: str = "", identity: str = "") -> None:
        """Map the note in the run directory. Without a run directory the note is in memory only: an engine that runs
        inside the caller's process is not restarted. ConfigError if the disk is full."""
        num_table, num_note = _HEAD_BYTES + MAX_KEYS * KEY_BYTES, NUM_SLOTS * KEY_BYTES
        self._table: Any = bytearray(num_table)
        self.cells: Any = bytearray(num_note)
        if run_directory:
            self._table = map_file(Path(run_directory, FILE_NAME), num_table)
            self.cells = map_file(note_path(run_directory, identity), num_note)
        self._seed = int.from_bytes(self._table[:_WORD], "little")
        self._num_seen, self._deadly = bytes(_WORD), frozenset[bytes]()
        self.current = NONE

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def key_of(self, *parts: bytes) -> bytes:
        """Return the key of a request that consists of `parts`."""
        return xxh3_128_digest(b"".join(parts), self._seed)

    def new_hash(self) -> xxh3_128:
        """Return a hash object. Once updated with all parts of a request, its digest is the request's key."""
        return xxh3_128(seed=self._seed)

    def is_deadly(self, key: bytes) -> bool:
        """Return whether the request with this key has ended LOSSES_TO_REFUSE frontends."""
        if (num := self._table[_WORD:_HEAD_BYTES]) != self._num_seen:
            self._num_seen = num
            self._deadly = frozenset(_keys(self._table[_HEAD_BYTES:]))
        return key in self._deadly

    # ── the note ─────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, key: bytes) -> bytes:
        """Record that the loop now works on the request with this key; return the previous key, for `end`."""
        before, self.current = self.current, key
        self.cells[:KEY_BYTES] = key
        return before

    def end(self, before: bytes = NONE) -> None:
        """Record that this work is over: `before`, from `begin`, is current again. Not called after an exception that
        leaves the loop, since that ends the process and the note must stay."""
        self.current = before
        self.cells[:KEY_BYTES] = before

    def hold(self, slot: int, key: bytes) -> None:
        """Record the key of the request that a thread works on, NONE if there is none. `slot`: the thread's own, 1 to
        NUM_SLOTS - 1."""
        start = slot * KEY_BYTES
        self.cells[start : start + KEY_BYTES] = key

    def bound(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """Return a wrapper of `function` that records a later call as work on the request that is current now."""
        if (key := self.current) == NONE:
            return function

        def call(argument: T) -> None:
            before = self.begin(key)
            function(argument)
            self.end(before)

        return call

    def slices(self, work: Coroutine[Any, Any, T]) -> NotedCoroutine[T]:
        """Return a wrapper of `work` that records each slice of it, from one wait to the next, as work on the request
        that is current now."""
        return NotedCoroutine(self, work, self.current)


class NotedCoroutine(Coroutine[Any, Any, T], Generic[T]):
    """Coroutine that records its slices as work on the request `key`. The key may change as more of the request is
    read."""

    __slots__ = ("_cells", "_note", "_send", "_work", "key")

    def __init__(self, note: ReadingNote, work: Coroutine[Any, Any, T], key: bytes) -> None:
        self._note, self._cells, self._work, self._send, self.key = note, note.cells, work, work.send, key

    def send(self, value: Any) -> Any:
        note, cells = self._note, self._cells  # `begin` and `end`, inlined: this runs for every token of a stream
        before, note.current = note.current, self.key
        cells[:KEY_BYTES] = self.key
        try:
            return self._send(value)
        finally:
            note.current = cells[:KEY_BYTES] = before

    def __next__(self) -> Any:
        return self.send(None)

    def __iter__(self) -> NotedCoroutine[T]:
        return self

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # `await` takes any iterator that has send, throw and close

    def throw(self, kind: Any, error: Any = None, traceback: TracebackType | None = None) -> Any:
        before = self._note.begin(self.key)
        try:
            return self._work.throw(kind if error is None else error)
        finally:
            self._note.end(before)

    def close(self) -> None:
        self._work.close()


class DeadlyRequests:
    """Owner of the table of deadly keys, in the supervisor. It counts the frontends that each request has ended."""

    def __init__(self, run_directory: Path) -> None:
        """Make an empty table. ConfigError if the disk is full."""
        self._directory = run_directory
        self._table = map_file(run_directory / FILE_NAME, _HEAD_BYTES + MAX_KEYS * KEY_BYTES)
        self._table[:_WORD] = secrets.token_bytes(_WORD)
        self._losses: dict[bytes, int] = {}  # by key
        self._num_keys = 0

    def on_loss(self, identity: str, *, is_to_blame: bool) -> None:
        """Read and remove the note of a frontend that was lost, and count its requests if `is_to_blame`: the frontend
        hung or ended by itself, so that one of them may be the cause."""
        path = note_path(str(self._directory), identity)
        try:
            keys = set(_keys(path.read_bytes()))
            path.unlink()
        except OSError:  # the frontend ended before it had a note
            return
        for key in keys if is_to_blame else ():
            num_losses = self._losses.pop(key, 0) + 1
            self._losses[key] = num_losses  # the newest is last
            text = "a frontend was lost while it worked on a request, %d of %d times%s"
            end = ": the request is refused from now on" if num_losses >= LOSSES_TO_REFUSE else ""
            logger.error(text, num_losses, LOSSES_TO_REFUSE, end)
            if num_losses == LOSSES_TO_REFUSE:
                self._refuse(key)
        for key in list(self._losses)[:-MAX_KEYS]:
            del self._losses[key]

    def _refuse(self, key: bytes) -> None:
        start = _HEAD_BYTES + self._num_keys % MAX_KEYS * KEY_BYTES
        self._table[start : start + KEY_BYTES] = key
        self._num_keys += 1
        self._table[_WORD:_HEAD_BYTES] = self._num_keys.to_bytes(_WORD, "little")


def note_path(run_directory: str, identity: str) -> Path:
    """Return the path of the note of the frontend with this identity."""
    return Path(run_directory) / f"{identity}.reading"


def _keys(content: bytes) -> Iterable[bytes]:
    """Return the keys in `content`, without empty slots."""
    found = (content[start : start + KEY_BYTES] for start in range(0, len(content), KEY_BYTES))
    return (key for key in found if key != NONE)
