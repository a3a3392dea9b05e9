"""Slot: the part of the journal of one connection: its request, its tokens, and its last written bytes.

    | two banks of the record | tokens … | ring of written bytes | bytes of the request, and a large answer aside |

All is in place before the record is written that refers to it, and a record is written before its bytes go to the
kernel. So at any moment the bytes between the kernel's count and the record's `out_end` can be written again. Bytes of
a request come from the kernel straight to their place (`room`), so that the kernel's count of bytes that were read says
what is there, even if the record does not yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Protocol

from .pages import BODY_PLACE, PAGE, READ_BYTES, RING_BYTES, TOKENS_END, Pages
from .record import BANK_BYTES, NUM_BANKS, Memory, Reason, Record, State
from .tokens import ShownAnswers, TokenWriter, decode

TOKENS_PLACE = NUM_BANKS * BANK_BYTES
MAX_MAPPED = 64 << 10  # a larger body is written by a call, so that its pages are not mapped
KEPT_BYTES = 8 << 10  # of tokens and of a request, which an idle connection keeps for its next request
_TOKENS, _RING, _BODY = range(3)  # parts
_PLACES = (0, TOKENS_END, BODY_PLACE)
_READS = (State.IDLE, State.OPEN)  # states in which bytes are read to the journal
_COVERED = (State.OPEN, State.STREAM)  # states with a request that another frontend can go on with


class Shown(Protocol):
    """Tokens that a piece of an answer shows beyond the ones before it, and the state after it."""

    tokens: list[tuple[int, bytes]]  # choice, token ids, encoded
    num_events: int
    num_cached: int
    seed: int
    logprobs: list[tuple[int, bytes]]  # choice, those of a token
    sources: list[tuple[int, bytes]]  # prompt, digests of its adapter and media

    @property
    def ended(self) -> Sequence[tuple[int, str]]:
        """Choices that have ended, with their finish reasons."""


class Slot:
    """One connection's slot, mapped. `record` was written last, but for bytes of a lost request. `uncovered`: the
    reason why its requests cannot go on after a loss, NONE if they can."""

    def __init__(self, pages: Pages, number: int, version: int) -> None:
        self.number, self.uncovered = number, Reason.NONE
        self._pages, self._version = pages, version
        self._memory, self._map, self._place = pages.memory, pages.map, pages.place_of(number)
        self._tokens_place = self._place + TOKENS_PLACE
        self._ring_place = self._place + TOKENS_END
        self.record = Record.read(self._memory, self._place)
        self._writer = TokenWriter()
        self._num_whole = 0  # banks with the present fields beside the progress; all only amid an answer
        self._used = [PAGE, 0, 0]  # bytes of each part that have pages
        self._has_unrecorded = self.record.state in _READS  # bytes may have been read that no record has yet
        self._take_over()

    def _take_over(self) -> None:
        """Take the pages that an earlier process has left and that are needed, and give the others back."""
        record, sizes = self.record, (0, 0, 0)
        if record.state is not State.FREE:
            kept = record.out_end - record.out_begin
            body = record.aside + kept if record.aside else record.in_len
            has_body = record.state in _COVERED or record.aside
            sizes = (TOKENS_PLACE + record.tokens_len, min(kept, RING_BYTES), body if has_body else 0)
        for part, (start, size) in enumerate(zip(_PLACES, sizes, strict=True)):
            used = self._used[part] = max(size + -size % PAGE, self._used[part])
            self._pages.take_over(used - PAGE if part == _TOKENS else used)
            if part == _BODY and self._has_unrecorded:
                used = min(used + READ_BYTES, self._pages.body_bytes)
            self._pages.punch(self._place + start + used, (*_PLACES[1:], self._pages.slot_bytes)[part] - start - used)

    # ── a connection ──

    def open(self, uncovered: Reason, connection: int) -> None:
        """Begin with a connection that was accepted just now, by its number."""
        self.uncovered = uncovered
        self.record = Record(sequence=self.record.sequence, version=self._version, connection=connection)
        self._move(State.IDLE)

    def begin_stream(self, request: bytes, nonce: bytes, created: float) -> bool:
        """Begin with a stream that outlives its connections; return False if there is no room for its request."""
        size = len(request)
        if size > self._pages.body_bytes or not self._grow(_BODY, size):
            return False
        self.record = Record(sequence=self.record.sequence, version=self._version, nonce=nonce, created=created)
        self.record.in_len = size
        self._writer = TokenWriter()
        self._store(BODY_PLACE, request)
        self._move(State.STREAM)
        return True

    def free(self) -> None:
        """End with the connection, after its socket was closed, or with the stream."""
        self._move(State.FREE)
        self._trim(_TOKENS, _RING, _BODY)
        if self._has_unrecorded:
            self._drop_unrecorded()

    def begin_early(self, num_pending: int) -> None:
        """A request begins among bytes that were read with the one before it, or before its answer: neither can go on
        after a loss. `num_pending`: as for `put_in`."""
        if self.record.state is State.IDLE:
            self._begin(num_pending)
        self.lose(Reason.PIPELINE)

    def lose(self, reason: Reason) -> None:
        """Give up to go on with the open request after a loss."""
        if self.record.state in _COVERED:
            self.record.reason = reason
            self._move(State.LOST)

    def end(self, state: State) -> None:
        """The request is answered, by a piece without bytes."""
        self._move(state)

    def _move(self, state: State) -> None:
        self.record.move(state)
        self._write()

    def _write(self) -> None:
        """Write the record, of which any field may be new."""
        self._num_whole = 1
        self.record.write(self._memory, self._place)

    # ── requests ──

    def room(self, num_pending: int) -> Memory:
        """Return the memory to which the next bytes are to be read. `num_pending`: bytes that were written and are not
        yet with the kernel."""
        if not self._is_read_in_place(num_pending):
            return self._pages.unkept
        record = self.record
        start = record.in_len if record.state is State.OPEN else 0
        size = min(READ_BYTES, self._pages.body_bytes - start)
        place = self._place + BODY_PLACE + start
        return self._memory[place : place + size] if size > 0 else self._pages.unkept

    def _is_read_in_place(self, num_pending: int) -> bool:
        """Return whether the next bytes belong into the journal: but for those that would overwrite an answer aside,
        whose request is lost."""
        record = self.record
        if record.state is State.IDLE:
            return not self.uncovered and (not record.aside or num_pending == 0)
        return record.state is State.OPEN

    def put_in(self, num_bytes: int, num_pending: int) -> None:
        """Record bytes that were read to `room`. The first ones after an answer begin a request."""
        record = self.record
        if record.state is State.IDLE:
            self._begin(num_pending)
        record.in_len += num_bytes
        if record.state is not State.OPEN:
            return
        if record.in_len > self._pages.body_bytes or not self._grow(_BODY, record.in_len):
            self.lose(Reason.SIZE)
            self._drop_unrecorded()
            self._trim(_BODY)  # a large upload may take minutes
            return
        self._write()

    def take_read(self, num_read: int, num_pending: int) -> None:
        """Record the bytes that a lost frontend had read to their place, and not recorded. `num_read`: the kernel's
        count."""
        record = self.record
        num_new = num_read - record.in_begin - record.in_len
        is_alone = record.state is State.IDLE or not record.has_head  # not a second request, amid an answer
        if 0 < num_new <= READ_BYTES and is_alone and self._is_read_in_place(num_pending):
            self.put_in(num_new, num_pending)
        self._drop_unrecorded()

    def _drop_unrecorded(self) -> None:
        """Give back the pages behind the request to which bytes may have been read."""
        self._has_unrecorded = False
        used = self._used[_BODY]
        self._pages.punch(self._place + BODY_PLACE + used, min(READ_BYTES, self._pages.body_bytes - used))

    def _begin(self, num_pending: int) -> None:
        record = self.record
        record.in_begin, record.in_len = record.in_begin + record.in_len, 0
        record.answer_begin, record.has_head = record.out_end, False
        record.tokens_len = record.num_events = record.num_cached = record.seed = record.losses = 0
        record.created, record.nonce, record.version = time.time(), os.urandom(16), self._version
        self._writer = TokenWriter()
        record.move(State.OPEN)
        if num_pending == 0:
            record.out_begin = record.out_end
            record.aside = 0
        if record.aside:  # it would be overwritten
            self.lose(Reason.PIPELINE)
        if self.uncovered:
            self.lose(self.uncovered)

    def request(self) -> bytes:
        """Return the bytes of the open request that were read."""
        return os.pread(self._pages.fd, self.record.in_len, self._place + BODY_PLACE)

    # ── answers ──

    def put_out(
        self,
        data: bytes,
        num_pending: int,
        shown: Shown | None = None,
        end: State | None = None,
        *,
        is_head: bool = False,
    ) -> None:
        """Keep a piece that is about to be written, with the tokens that it shows. `end`: the state of the connection
        after it, for an answer's last piece. `is_head`: it has the answer's status line."""
        record = self.record
        has_news = bool(is_head or end is not None or record.aside or record.losses)  # beside the progress
        record.has_head = (record.has_head or is_head) and end is None
        if record.state is State.OPEN:
            self._keep(data, num_pending, has_ended=end is not None)
        if record.state is not State.OPEN:  # not covered
            record.out_end += len(data)
            if end is not None:
                record.out_begin, record.aside = record.out_end, 0
                self._move(end)
            return
        if shown is not None:
            has_news |= self._add_tokens(shown)
        if end is not None:
            record.move(end)
        if has_news or self._num_whole < NUM_BANKS:
            self._num_whole = 1 if has_news else NUM_BANKS
            record.write(self._memory, self._place)
        else:
            record.write_progress(self._memory, self._place)
        if end is not None and not record.aside:
            self._trim(_TOKENS, _BODY)

    def put_next(self, data: bytes, shown: Shown | None) -> bool:
        """Keep a piece as nearly all are, when the kernel has all before it: amid an answer, with tokens of one choice,
        after pieces that only the progress tells apart. Return False, and do nothing, if it is another one: for
        `put_out`."""
        record = self.record
        if shown is None or self._num_whole < NUM_BANKS or shown.ended or shown.logprobs or shown.sources:
            return False
        if shown.num_cached != record.num_cached or shown.seed != record.seed:
            return False
        words, written = b"", self._writer.choice
        for choice, token_ids in shown.tokens:
            if choice != written:
                return False
            words += token_ids
        used = self._used
        begin, size = self._tokens_place + record.tokens_len, len(data)
        end = begin + len(words)
        if size > used[_RING] or end > self._place + used[_TOKENS]:
            return False
        mapped, ring = self._map, self._ring_place  # quicker than by a memoryview
        mapped[begin:end] = words
        mapped[ring : ring + size] = data
        record.tokens_len += len(words)
        record.out_begin = out_end = record.out_end
        record.out_end = out_end + size
        record.num_events = shown.num_events
        record.write_progress(self._memory, self._place)
        return True

    def put_tokens(self, shown: Shown) -> None:
        """Keep tokens of a whole answer, which has no bytes yet, or of a stream."""
        if self.record.state in _COVERED:
            self._add_tokens(shown)
            if self.record.state in _COVERED:
                self._write()

    def _keep(self, data: bytes, num_pending: int, *, has_ended: bool) -> None:
        """Copy a piece behind the bytes that the kernel lacks: into the ring, or aside if it is large and the last one.
        Otherwise lose the request."""
        record, size = self.record, len(data)
        if num_pending == 0:
            record.out_begin = record.out_end
            record.aside = 0
        start = (record.out_end - record.out_begin) % RING_BYTES
        if start + size <= self._used[_RING] and num_pending + size <= RING_BYTES:  # nearly always
            place = self._place + TOKENS_END + start
            self._memory[place : place + size] = data
            record.out_end += size
            return
        if num_pending + size > RING_BYTES:
            if has_ended and self._keep_aside(data, num_pending):
                record.out_end += size
            else:
                self.lose(Reason.SIZE)
            return
        first = min(size, RING_BYTES - start)
        if not self._grow(_RING, start + first if first == size else RING_BYTES):
            self.lose(Reason.SIZE)
            return
        ring = self._place + TOKENS_END
        self._memory[ring + start : ring + start + first] = data[:first]
        if first < size:
            self._memory[ring : ring + size - first] = data[first:]
        record.out_end += size

    def _keep_aside(self, data: bytes, num_pending: int) -> bool:
        record = self.record
        place = record.in_len + -record.in_len % 8
        size = num_pending + len(data)
        if place + size > self._pages.body_bytes or not self._grow(_BODY, place + size):
            return False
        pending = self.unsent(record.out_end - num_pending)
        if pending is None:
            return False
        self._store(BODY_PLACE + place, pending)
        self._store(BODY_PLACE + place + num_pending, data)
        record.out_begin, record.aside = record.out_end - num_pending, place
        return True

    def unsent(self, num_taken: int) -> bytes | None:
        """Return the written bytes after those that the kernel has taken; None if they are not kept."""
        record = self.record
        size, kept = record.out_end - num_taken, record.out_end - record.out_begin
        if not 0 <= size <= (kept if record.aside else min(kept, RING_BYTES)):
            return None
        if record.aside:
            return os.pread(self._pages.fd, size, self._place + BODY_PLACE + record.aside + kept - size)
        ring, start = self._place + TOKENS_END, (kept - size) % RING_BYTES
        first = min(size, RING_BYTES - start)
        return bytes(self._memory[ring + start : ring + start + first]) + bytes(
            self._memory[ring : ring + size - first]
        )

    # ── tokens ──

    def _add_tokens(self, shown: Shown) -> bool:
        """Keep tokens; return whether a field beside the progress has changed."""
        record = self.record
        record.num_events = shown.num_events
        has_news = record.num_cached != shown.num_cached or record.seed != shown.seed or record.losses > 0
        record.num_cached, record.seed = shown.num_cached, shown.seed
        if shown.tokens or shown.ended or shown.sources:
            words = self._writer.encode(shown.tokens, shown.ended, shown.logprobs, shown.sources)
            start = TOKENS_PLACE + record.tokens_len
            end = start + len(words)
            if end > self._used[_TOKENS] and not (end <= TOKENS_END and self._grow(_TOKENS, end)):
                self.lose(Reason.SIZE)
                return True
            self._memory[self._place + start : self._place + end] = words
            record.tokens_len += len(words)
        if shown.tokens or shown.ended:
            record.losses = 0
        return has_news

    def shown(self) -> ShownAnswers:
        """Return the shown part of the open answer; new tokens are added behind."""
        start = self._place + TOKENS_PLACE
        found, self._writer = decode(bytes(self._memory[start : start + self.record.tokens_len]))
        return found

    def count_loss(self) -> None:
        """Count a lost frontend, before another one begins with the request."""
        self.record.losses += 1
        self._write()

    # ── memory ──

    def _store(self, place: int, data: bytes) -> None:
        place += self._place
        if len(data) > MAX_MAPPED:
            self._pages.write(place, data)
        else:
            self._memory[place : place + len(data)] = data

    def _grow(self, part: int, end: int) -> bool:
        """Take the pages of a part up to `end`; return False if there are no more."""
        used = self._used[part]
        if end <= used:
            return True
        end += -end % PAGE
        if not self._pages.take(end - used):
            return False
        self._used[part] = end
        return True

    def _trim(self, *parts: int) -> None:
        """Give pages back that large parts have taken."""
        for part in parts:
            used = self._used[part]
            if used > KEPT_BYTES:
                self._pages.punch(self._place + _PLACES[part] + KEPT_BYTES, used - KEPT_BYTES)
                self._pages.give_back(used - KEPT_BYTES)
                self._used[part] = KEPT_BYTES
