"""Clients that read slowly, fall silent, reconnect, abort, or submit a request again."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.base import LEASE_S, PROTOCOL_VERSION, Hello, Ping, Pong, Refused, Unknown, Welcome
from tokenloom.ipc.messages.client import CREDIT_WINDOW, Abort, Accepted, Credit
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


def test_a_negative_credit_is_refused(bench: Bench) -> None:
    (refused,) = bench.say(Credit(count=-5))
    assert isinstance(refused, Refused) and "-5" in refused.error.message


def test_the_lease_runs_only_while_requests_are_open(bench: Bench) -> None:
    bench.now += 100 * LEASE_S
    assert bench.frontend.seconds_to_tick(bench.now) is None
    key = bench.submit()
    for _ in range(5):
        bench.wait(LEASE_S * 0.9)
        assert bench.say(Ping()) == [Pong()]
    assert bench.aborted() == []
    bench.wait(LEASE_S * 1.01)
    assert bench.aborted() == [key] and bench.frontend.counts["requests_aborted_silent"] == 1
    assert bench.say(Ping()) == [Unknown()]


def test_a_client_without_requests_has_no_lease(bench: Bench) -> None:
    bench.hello(b"idle")
    bench.submit()
    for _ in range(10):
        bench.now += 1
        bench.say(Ping())
    assert bench.say(Ping(), client=b"idle") == [Pong()]


def test_leases_are_not_checked_before_all_messages_are_read(bench: Bench) -> None:
    bench.submit()
    for _ in range(10):
        bench.now += 1
        bench.frontend.tick(bench.now, check_leases=False)
    assert bench.frontend.num_open_requests == 1
    bench.turn()
    assert bench.frontend.num_open_requests == 0


def test_leases_restart_if_the_loop_was_stopped(bench: Bench) -> None:
    bench.submit()
    for _ in range(5):
        bench.now += 10 * LEASE_S
        bench.turn()
        bench.turn()
    assert bench.frontend.num_open_requests == 1


def test_the_loop_wakes_for_the_next_lease_or_ping(bench: Bench) -> None:
    bench.submit()
    seconds = bench.frontend.seconds_to_tick(bench.now)
    assert seconds is not None and 0 < seconds <= 1
    bench.say(Abort(request_id="r"))
    bench.wait(LEASE_S + 1)
    assert bench.frontend.seconds_to_tick(bench.now) is None


def test_losing_a_client_ends_only_its_requests(bench: Bench) -> None:
    bench.hello(b"d")
    mine, other = bench.submit(), bench.submit(client=b"d")
    bench.to_core.clear()
    bench.frontend.on_client_lost(b"c", "gone", "its connection has ended")
    bench.turn()
    assert bench.aborted() == [mine]
    bench.tokens((mine, 0, ids("The")), (other, 0, ids("The")))
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


def test_abort_sends_the_last_delta_and_ignores_unknown_ids(bench: Bench) -> None:
    key = bench.submit()
    (delta,) = bench.news(Abort(request_id="r"))
    assert delta.finish_reason == "abort" and bench.aborted() == [key]
    assert bench.say(Abort(request_id="r"), Abort(request_id="never")) == []


def test_an_equal_attempt_changes_nothing_and_is_accepted_again(bench: Bench) -> None:
    key = bench.submit(accept=False)
    bench.to_core.clear()
    assert bench.say(new_submit()) == [] and bench.to_core == []
    bench.core(accepted=[key])
    bench.heard()
    (again,) = bench.say(new_submit())
    assert isinstance(again, Accepted) and bench.to_core == []


def test_another_request_with_an_open_id_is_refused_and_the_first_continues(bench: Bench) -> None:
    key = bench.submit()
    (refused,) = bench.say(new_submit(prompt="something else"))
    assert isinstance(refused, Refused) and "is already open" in refused.error.message
    bench.tokens((key, 0, ids("The")))
    assert len(bench.deltas()) == 1


def test_a_higher_attempt_replaces_the_request_without_a_final_delta(bench: Bench) -> None:
    first = bench.submit(accept=False)
    second = bench.submit(attempt=1)
    assert bench.aborted() == [first]
    bench.tokens((first, 0, ids("x")), (second, 0, ids("The")), finished=[Finished(key=first, reason="abort")])
    assert [delta.text for delta in bench.deltas()] == ["The"]


def test_unsent_updates_of_a_replaced_attempt_are_dropped(bench: Bench) -> None:
    first = bench.submit()
    for start in range(CREDIT_WINDOW + 1):
        bench.tokens((first, start, [40]))
    bench.heard()
    second = bench.submit(attempt=1)
    bench.tokens((second, 0, ids("The")))
    (delta,) = bench.news(Credit(count=CREDIT_WINDOW))
    assert delta.start == 0 and delta.text == "The"


def test_one_request_id_of_two_clients_is_two_requests(bench: Bench) -> None:
    bench.hello(b"d")
    mine, other = bench.submit(), bench.submit(client=b"d")
    bench.tokens((mine, 0, ids("The")), (other, 0, ids("Don")))
    assert [d.text for d in bench.deltas()] == ["The"] and [d.text for d in bench.deltas(b"d")] == ["Don"]


def test_a_second_hello_keeps_requests_and_restores_credits(bench: Bench) -> None:
    key = bench.submit()
    for start in range(CREDIT_WINDOW + 5):
        bench.tokens((key, start, [40]))
    bench.heard()
    messages = bench.say(Hello(protocol_version=PROTOCOL_VERSION))
    assert isinstance(messages[0], Welcome) and deltas_of(messages)[0].start == CREDIT_WINDOW
