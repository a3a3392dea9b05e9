"""SessionTable is bounded and evicts only sessions without open work."""

from __future__ import annotations

from tokenloom.frontend.requests.client_session import MAX_IN_FLIGHT_BYTES
from tokenloom.frontend.requests.session_table import MAX_SESSIONS, SessionTable
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.client import Delta


def test_the_longest_silent_sessions_without_requests_are_evicted_first() -> None:
    table = SessionTable()
    for number in range(MAX_SESSIONS):
        session = table.add(b"%d" % number, now=float(number))
        if number % 2:
            session.refusals.append(Delta(request_id="r"))  # it has open work
    table.add(b"one more", now=1e6)
    assert len(list(table)) == MAX_SESSIONS - MAX_SESSIONS // 4 + 1
    assert table.get(b"0") is None and table.get(b"1") is not None
    assert table.get(b"%d" % (MAX_SESSIONS - 2)) is not None


def test_the_number_of_sessions_is_bounded() -> None:
    table = SessionTable()
    for number in range(3 * MAX_SESSIONS):
        table.add(b"%d" % number, now=float(number))
    assert len(list(table)) <= MAX_SESSIONS


def test_only_a_marked_session_with_updates_yields_frames() -> None:
    table = SessionTable()
    session = table.add(b"c", now=0.0)
    table.mark(session)
    assert table.take_frames() == []
    session.refusals.append(Delta(request_id="r"))
    table.mark(session)
    assert [identity for identity, _ in table.take_frames()] == [b"c"] and table.take_frames() == []


def test_large_updates_wait_for_credits_once_many_bytes_are_in_flight() -> None:
    session = SessionTable().add(b"c", now=0.0)
    error = ErrorInfo("request", "x" * (MAX_IN_FLIGHT_BYTES // 8))
    frames: list[bytes] = []
    for number in range(20):
        session.refusals.append(Delta(request_id=f"{number}", error=error))
        frames += session.take_frames()
    assert len(frames) == 8 == session.num_in_flight and session.has_updates
    session.credit(1)
    frames += session.take_frames()
    assert len(frames) == 9 and not session.has_updates, "the rest in one message"
    assert [frames[-1].count(b"request_id"), session.num_in_flight] == [12, 8]
    session.credit(10**15)
    assert session.num_in_flight == 0
