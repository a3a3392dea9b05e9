"""Adoption: a new frontend goes on with the HTTP connections that the one before has left.

For each connection the journal's record and the kernel's counts decide (`plan`). Bytes that the kernel lacks are
written first. The bytes of an open request are parsed again, and its handler begins with the tokens that its client
has (api/continuation.py).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, cast

from .....ipc.process.faults import maybe_fail
from ....listening.journal.journal import HttpJournal
from ....listening.journal.record import MAX_LOSSES, Reason, State
from ....listening.journal.slot import Slot
from ....listening.kernel_count import KernelCount
from .connection import ConnectionKeeper, Kept, KeptConnection

logger = logging.getLogger("tokenloom.http")


class Step(enum.Enum):
    """What becomes of a connection."""

    SERVE = enum.auto()  # go on with it, and with its request if one is open
    FINISH = enum.auto()  # write the rest of its answer and close it
    REFUSE = enum.auto()  # answer that the request must be sent again
    FAIL = enum.auto()  # answer that the request cannot be answered
    CUT = enum.auto()  # close it amid an answer
    DROP = enum.auto()  # close it: its client has gone


class Plan(NamedTuple):
    """A step, with the reason if an answer is cut."""

    step: Step
    reason: Reason = Reason.NONE


class Adoptable(Protocol):
    """The part of HttpConnection that is used here."""

    transport: asyncio.Transport

    def refuse_lost(self, *, is_final: bool) -> None: ...


def plan(slot: Slot, count: KernelCount, *, is_same_version: bool) -> Plan:
    """Decide about a connection that a lost frontend has left."""
    record, state = slot.record, slot.record.state
    if not count.is_writable or state is State.FREE:
        return Plan(Step.DROP)
    if state is State.LOST:
        return Plan(Step.CUT, record.reason)
    if slot.unsent(count.num_taken) is None:
        return Plan(Step.CUT, Reason.SIZE)
    if state is State.CLOSING:
        return Plan(Step.FINISH)
    if count.num_read != record.in_begin + record.in_len:  # bytes that were read are not in the journal
        return Plan(Step.CUT if record.has_head and state is State.OPEN else Step.REFUSE, Reason.UNREAD)
    if state is State.IDLE:
        return Plan(Step.SERVE)
    if record.losses >= MAX_LOSSES:
        return Plan(Step.CUT if record.has_head else Step.FAIL, Reason.LOST_OFTEN)
    if record.has_head and not is_same_version:
        return Plan(Step.CUT, Reason.VERSION)
    return Plan(Step.SERVE)


async def adopt(
    keeper: ConnectionKeeper,
    kept: Iterable[tuple[int, socket.socket]],
    new_connection: Callable[[Kept, socket.socket], Adoptable],
) -> list[tuple[socket.socket, int]]:
    """Go on with the connections that the supervisor has kept, by number, before new ones are accepted. Return those
    that the frontend before had not begun with."""
    journal, num_adopted = keeper.journal, 0
    sockets = dict(kept)
    for slot in list(journal.slots.values()):
        if slot.record.state is State.STREAM:
            continue
        if (connection := sockets.pop(slot.record.connection, None)) is None:
            _drop_uncovered(journal, slot)
            continue
        count = KernelCount.of(connection)
        is_same_version = journal.is_of_this_version(slot)
        slot.take_read(count.num_read, slot.record.out_end - count.num_taken)
        decided = plan(slot, count, is_same_version=is_same_version)
        goes_on = slot.record.state is State.OPEN and decided.step is Step.SERVE
        if decided.reason is not Reason.NONE:
            journal.count_cut(decided.reason)
        unsent, request = slot.unsent(count.num_taken), slot.request() if goes_on else b""
        adopted = KeptConnection(keeper, slot, connection, unsent or b"", request)
        if decided.step in (Step.CUT, Step.DROP):
            adopted.close()
            connection.close()
            continue
        if goes_on:
            slot.count_loss()
            journal.count_resumed()
        maybe_fail("http.adopt")
        await _go_on(decided.step, connection, adopted, new_connection(adopted, connection))
        num_adopted += 1
    if num_adopted:
        logger.info("%d HTTP connections of the frontend before go on", num_adopted)
    return [(connection, number) for number, connection in sockets.items() if _is_new(number, connection, keeper)]


def _is_new(number: int, connection: socket.socket, keeper: ConnectionKeeper) -> bool:
    """Return whether nobody has read from a connection that has no slot. Close it if it has ended, or was not to be
    kept, and the message about that is lost."""
    if connection.family == socket.AF_UNIX:  # whose bytes the kernel does not count
        return True
    count = KernelCount.of(connection)
    if count.is_writable and count.num_read == 0:
        return True
    keeper.drop(number)
    connection.close()
    return False


async def _go_on(step: Step, connection: socket.socket, kept: KeptConnection, protocol: Adoptable) -> None:
    reader = kept.reader(cast(asyncio.Protocol, protocol))
    connection.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: cast(asyncio.Protocol, reader), connection)
    if step is Step.FINISH:
        protocol.transport.close()
    elif step in (Step.REFUSE, Step.FAIL):
        protocol.refuse_lost(is_final=step is Step.FAIL)


def _drop_uncovered(journal: HttpJournal, slot: Slot) -> None:
    """Count the cut answer, if any, of a connection that ended with its frontend."""
    record = slot.record
    if record.state is State.LOST:
        journal.count_cut(record.reason)
    elif record.state is State.OPEN:
        journal.count_cut(Reason.DESCRIPTORS)
    journal.free_slot(slot)
