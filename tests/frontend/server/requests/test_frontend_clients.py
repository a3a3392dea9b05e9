"""Clients that read slowly, fall silent, reconnect, abort, or submit a request again; the table of their sessions."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from tokenloom.frontend.server.requests.client_session import MAX_IN_FLIGHT_BYTES
from tokenloom.frontend.server.requests.session_table import MAX_SESSIONS, SessionTable
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import LEASE_S, PROTOCOL_VERSION, Hello, Ping, Pong, Refused, Unknown, Welcome
from tokenloom.ipc.messages.client import CREDIT_WINDOW, Abort, Accepted, Credit, Delta
from tokenloom.ipc.messages.core import Finished
from tokenloom.tests.frontend.bench import TOKENIZER, Bench, deltas_of, ids, new_submit


def test_a_slow_client_gets_merged_updates_and_does_not_delay_others(bench: Bench) -> None:
    bench.hello(b"slow")
    slow, quick = bench.submit("s", client=b"slow"), bench.submit("q")
    tokens = [random.Random(1).randrange(4, 400) for _ in range(1000)]
    for start, token_id in enumerate(tokens):
        bench.tokens((slow, start, [token_id]), (quick, start, [token_id]))
        bench.say(Credit(count=1))
        bench.now += 0.001
    unread = bench.heard(b"slow")
    assert len(unread) == CREDIT_WINDOW
    (merged,) = bench.news(Credit(count=CREDIT_WINDOW), client=b"slow")
    assert merged.start == CREDIT_WINDOW and decode_ids(merged.token_ids).tolist() == tokens[CREDIT_WINDOW:]
    assert "".join(delta.text for delta in [*deltas_of(unread), merged]) == TOKENIZER.decode(tokens).rstrip("\ufffd")


def test_the_lease_runs_only_while_requests_are_open(bench: Bench) -> None:
    bench.hello(b"idle")
    bench.now += 100 * LEASE_S
    assert bench.frontend.seconds_to_tick(bench.now) is None
    key = bench.submit()
    seconds = bench.frontend.seconds_to_tick(bench.now)
    assert seconds is not None and 0 < seconds <= 1, "the next lease or ping"
    for _ in range(5):
        bench.wait(LEASE_S * 0.9)
        assert bench.say(Ping()) == [Pong()]
    assert bench.aborted() == []
    bench.wait(LEASE_S * 1.01)
    assert bench.aborted() == [key] and bench.frontend.counts["requests_aborted_silent"] == 1
    assert bench.say(Ping()) == [Unknown()] and bench.frontend.seconds_to_tick(bench.now) is None
    assert bench.say(Ping(), client=b"idle") == [Pong()]


def test_leases_are_not_checked_before_all_messages_are_read_and_restart_if_the_loop_was_stopped(bench: Bench) -> None:
    bench.submit()
    for _ in range(5):
        bench.now += 10 * LEASE_S
        bench.turn()
        bench.turn()
    for _ in range(10):
        bench.now += 1
        bench.frontend.tick(bench.now, check_leases=False)
    assert bench.frontend.num_open_requests == 1
    bench.turn()
    assert bench.frontend.num_open_requests == 0


def test_a_request_id_of_two_clients_is_two_requests_and_a_lost_client_ends_only_its_own(bench: Bench) -> None:
    bench.hello(b"d")
    mine, other = bench.submit(), bench.submit(client=b"d")
    bench.tokens((mine, 0, ids("The")), (other, 0, ids("Don")))
    assert [d.text for d in bench.deltas()] == ["The"] and [d.text for d in bench.deltas(b"d")] == ["Don"]
    bench.to_core.clear()
    bench.frontend.on_client_lost(b"c", "gone", "its connection has ended")
    bench.turn()
    assert bench.aborted() == [mine]
    bench.tokens((mine, 1, ids("The")), (other, 1, ids("The")))
    assert bench.heard() == [] and len(bench.deltas(b"d")) == 1


@pytest.mark.parametrize(("cause", "num_lines"), [("gone", 1), ("slow", 2)])
def test_the_log_says_why_a_client_was_dropped_and_floods_of_it_are_few_lines(
    bench: Bench, caplog: pytest.LogCaptureFixture, cause: Literal["gone", "slow"], num_lines: int
) -> None:
    bench.submit()
    for _ in range(3):  # the 1st has a request
        bench.frontend.on_client_lost(b"c", cause, "104 MiB unread")
        bench.hello(b"c")
    lines = [f"a client is {cause} (104 MiB unread): its {number} requests were ended" for number in (1, 0)]
    assert caplog.messages == lines[:num_lines]
    assert bench.frontend.counts[f"clients_{cause}"] == 3
    assert bench.frontend.counts[f"requests_aborted_{cause}"] == 1


def test_an_equal_attempt_is_accepted_again_and_another_request_with_the_id_refused(bench: Bench) -> None:
    key = bench.core_request().children[0].key
    bench.to_core.clear()
    assert bench.say(new_submit()) == [] and bench.to_core == []
    bench.core(accepted=[key])
    bench.heard()
    (again,) = bench.say(new_submit())
    assert isinstance(again, Accepted) and bench.to_core == []
    (refused,) = bench.say(new_submit(prompt="something else"))
    assert isinstance(refused, Refused) and "is already open" in refused.error.message
    (refused,) = bench.say(Credit(count=-5))
    assert isinstance(refused, Refused) and "-5" in refused.error.message
    bench.tokens((key, 0, ids("The")))
    assert len(bench.deltas()) == 1
    (delta,) = bench.news(Abort(request_id="r"), Abort(request_id="r"), Abort(request_id="never"))
    assert delta.finish_reason == "abort" and bench.aborted() == [key]


def test_a_higher_attempt_replaces_the_request_and_its_unsent_updates_without_a_final_delta(bench: Bench) -> None:
    first = bench.submit()
    for start in range(CREDIT_WINDOW + 1):
        bench.tokens((first, start, [40]))
    bench.heard()
    bench.to_core.clear()
    second = bench.submit(attempt=1)
    assert bench.aborted() == [first]
    bench.tokens(
        (first, CREDIT_WINDOW + 1, [40]), (second, 0, ids("The")), finished=[Finished(key=first, reason="abort")]
    )
    (delta,) = bench.news(Credit(count=CREDIT_WINDOW))
    assert delta.start == 0 and delta.text == "The"


def test_a_second_hello_keeps_requests_and_restores_credits(bench: Bench) -> None:
    key = bench.submit()
    for start in range(CREDIT_WINDOW + 5):
        bench.tokens((key, start, [40]))
    bench.heard()
    messages = bench.say(Hello(protocol_version=PROTOCOL_VERSION))
    assert isinstance(messages[0], Welcome) and deltas_of(messages)[0].start == CREDIT_WINDOW


# ── the table of sessions ────────────────────────────────────────────────────────────────────────────────────────────


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
