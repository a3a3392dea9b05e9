"""Record: the state of a connection, in one of two banks of its slot, so that a torn one is noticed.

The banks are written in turn, so that the older record alone is overwritten. A record begins with the fields that each
piece of an answer changes, between two equal sequence numbers; the others stand behind and are written first. Packing
writes the fields one after the other, so that the second number is there only if all are. A reader takes the whole
record with the higher number.
"""

from __future__ import annotations

import enum
import struct
from typing import TypeAlias

import msgspec

Memory: TypeAlias = memoryview

BANK_BYTES = 256
NUM_BANKS = 2
# Frontends that may be lost with a request open that brings no new token. A request that ends frontends by itself is
# refused earlier (ipc/notes/deadly.py); one that is made again from its beginning survives several losses.
MAX_LOSSES = 20
PROGRESS = struct.Struct("<Q QQ II Q")  # sequence, out_begin, out_end, tokens_len, num_events, sequence
_OTHERS = struct.Struct("<BBBB II QQ QQ QQ d 16s")
assert PROGRESS.size + _OTHERS.size <= BANK_BYTES


class State(enum.IntEnum):
    """State of a connection, as its slot has it."""

    FREE = 0  # there is no connection
    IDLE = 1  # no request; all bytes that were read belong to answered requests
    OPEN = 2  # bytes of a request were read, its answer is not complete
    CLOSING = 3  # the last answer is complete, and the connection closes after it
    LOST = 4  # has a request that no other frontend can go on with
    STREAM = 5  # there is no connection, but a stream from which clients may read on


_MOVES: dict[State, frozenset[State]] = {
    State.FREE: frozenset((State.IDLE, State.LOST, State.STREAM)),
    State.IDLE: frozenset((State.OPEN, State.CLOSING, State.LOST, State.FREE)),
    State.OPEN: frozenset((State.IDLE, State.CLOSING, State.LOST, State.FREE)),
    State.CLOSING: frozenset((State.IDLE, State.FREE)),
    State.LOST: frozenset((State.IDLE, State.CLOSING, State.FREE)),
    State.STREAM: frozenset((State.LOST, State.FREE)),
}


class Reason(enum.IntEnum):
    """Reason why an open answer is cut if its frontend is lost; a metric label in lower case."""

    NONE = 0
    OFF = 1  # --no-keep-connections
    TLS = 2  # the keys end with the process
    UNIX = 3  # the kernel does not count the bytes of a unix socket
    SIZE = 4  # request, answer or tokens are too large, or --http-journal-bytes is used up
    PIPELINE = 5  # the client has sent a request before it had the answer to the one before
    ENDPOINT = 6  # a stream that shows no tokens from which it could go on
    LOST_OFTEN = 7  # MAX_LOSSES frontends were lost with it
    VERSION = 8  # another version of the program has begun it
    CHANGED = 9  # the successor answers with another status or form
    UNREAD = 10  # bytes of the request were read and lost
    DESCRIPTORS = 11  # the supervisor does not hold the connection


class Record(msgspec.Struct):
    """State of one connection. Offsets count the bytes of the connection since it was accepted, in each direction. The
    first fields are the progress of an answer."""

    sequence: int = 0
    out_begin: int = 0  # of the first byte that is kept
    out_end: int = 0  # after the last byte that was to be written
    tokens_len: int = 0  # bytes of the tokens that were shown
    num_events: int = 0
    state: State = State.FREE
    reason: Reason = Reason.NONE  # of LOST
    has_head: bool = False  # the answer's status line was written
    losses: int = 0  # frontends lost since the request's last new token
    version: int = 0  # of the program that read the request
    connection: int = 0  # its number, by which the supervisor holds it
    in_begin: int = 0  # of the request's first byte
    in_len: int = 0  # bytes of the request that were read
    answer_begin: int = 0  # of the answer's first byte
    aside: int = 0  # place of the kept bytes among the request's, 0: they are in the ring
    num_cached: int = 0
    seed: int = 0  # of the request, if it named none
    created: float = 0.0  # unix seconds of the request's first byte
    nonce: bytes = bytes(16)

    def move(self, state: State) -> None:
        assert state == self.state or state in _MOVES[self.state], f"{self.state.name} cannot become {state.name}"
        self.state = state

    def write(self, memory: Memory, place: int) -> None:
        """Write this record, with the next sequence number, to the next bank. `place`: of bank 0."""
        bank = place + (self.sequence + 1) % NUM_BANKS * BANK_BYTES
        _OTHERS.pack_into(
            memory,
            bank + PROGRESS.size,
            self.state,
            self.reason,
            self.has_head,
            self.losses,
            self.version,
            self.connection,
            self.in_begin,
            self.in_len,
            self.answer_begin,
            self.aside,
            self.num_cached,
            self.seed,
            self.created,
            self.nonce,
        )
        self.write_progress(memory, place)

    def write_progress(self, memory: Memory, place: int) -> None:
        """Write this record, as `write` does, if its other fields stand in the next bank already."""
        self.sequence = sequence = self.sequence + 1
        PROGRESS.pack_into(
            memory,
            place + sequence % NUM_BANKS * BANK_BYTES,
            sequence,
            self.out_begin,
            self.out_end,
            self.tokens_len,
            self.num_events,
            sequence,
        )

    @classmethod
    def read(cls, memory: Memory, place: int) -> Record:
        """Return the newest whole record; an empty one if there is none."""
        banks = [_read_bank(memory, place + bank * BANK_BYTES) for bank in range(NUM_BANKS)]
        return max(banks, key=lambda record: record.sequence)


def _read_bank(memory: Memory, place: int) -> Record:
    first, out_begin, out_end, tokens_len, num_events, last = PROGRESS.unpack_from(memory, place)
    if first != last or not first:
        return Record()
    state, reason, has_head, *others = _OTHERS.unpack_from(memory, place + PROGRESS.size)
    return Record(
        first, out_begin, out_end, tokens_len, num_events, State(state), Reason(reason), bool(has_head), *others
    )
