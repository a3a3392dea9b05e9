"""The laws of a conversation: each token once, whatever is lost; bounded, quiet when idle, dead when told so."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from tokenloom.frontend.client.keepalive import SILENCE_S
from tokenloom.frontend.client.protocol import CREDIT_BATCH, MAX_GAPS, QueryResult
from tokenloom.frontend.client.submit_window import MAX_UNANSWERED_BYTES, MAX_UNANSWERED_REQUESTS
from tokenloom.ipc.errors import EngineDead, ErrorInfo, Overloaded, ProtocolError, RequestError, TokenloomError
from tokenloom.ipc.messages.base import PING_INTERVAL_S, Hello, Ping, Pong, Refused, Unknown, Welcome
from tokenloom.ipc.messages.client import Accepted, Credit, Delta, Deltas, GetInfo, Info, Submit
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.frontend.fake_frontend import answer_tokens, prompt_ids, text_of
from tokenloom.tests.frontend.requests.rig import HELLO, Rig, check_answer


@pytest.mark.parametrize("seed", range(60))
def test_each_token_comes_once_and_in_order_whatever_is_lost_or_repeated(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig()
    rig.service.tokens_per_delta = rng.randint(1, 5)
    submits = []

    def spoil(delta: Delta) -> list[Delta]:
        dice = rng.random()
        return [] if dice < 0.03 and delta.finish_reason is None else [delta, delta] if dice < 0.15 else [delta]

    for step in range(300):
        rig.service.spoil = spoil if step < 250 else lambda delta: [delta]
        match rng.randrange(10):
            case 0:
                submits.append(rig.submit(f"r{step}", f"prompt {step}", max_tokens=rng.randint(1, 40)))
            case 1 if rng.random() < 0.2:
                rig.service.sessions.clear()
            case 2 if rng.random() < 0.2:
                rig.reopen()
            case 3:
                rig.now += rng.random()
                rig.protocol.tick(rig.now)
            case _:
                rig.carry(rng.randrange(4), rng.randrange(4))
                rig.service.generate()
        if rig.protocol.needs_reconnect:
            rig.reopen()
    rig.service.spoil = lambda delta: [delta]
    for _ in range(MAX_GAPS):  # a loss at the very end shows when the next ping is answered or not
        rig.settle()
        rig.reopen()
    rig.settle()
    for submit in submits:
        check_answer(submit, rig.updates[submit.request_id])
    assert not rig.protocol.is_busy


def test_a_resumed_request_carries_its_seed_and_the_tokens_that_came() -> None:
    rig = Rig()
    rig.submit("a", max_tokens=20)
    rig.carry()
    rig.carry()
    rig.carry()
    rig.service.generate()
    rig.carry()
    rig.service.sessions.clear()
    rig.protocol.receive(Unknown(), 0.0)
    assert isinstance(rig.to_frontend[0], Hello)
    rig.protocol.receive(HELLO, 0.0)
    (submit,) = rig.sent(Submit)
    assert isinstance(submit, Submit)
    assert submit.attempt == 1
    assert submit.arrival_time == 1.0  # the frontend's own word
    assert submit.prompt is None and submit.prompt_token_ids == prompt_ids(
        Submit(request_id="a", prompt="p", params=SamplingParams())
    )
    assert submit.children[0].seed == 5
    assert len(submit.children[0].output_token_ids) == 4 * 4


def test_several_unknowns_make_one_hello() -> None:
    rig = Rig()
    rig.settle()
    for _ in range(3):
        rig.protocol.receive(Unknown(), 0.0)
    assert len(rig.sent(Hello)) == 1


def test_an_accepted_of_an_older_attempt_is_not_taken() -> None:
    rig = Rig()
    rig.protocol.receive(HELLO, 0.0)
    rig.submit("a")
    rig.reopen()
    rig.protocol.receive(HELLO, 0.0)
    old = Accepted(request_id="a", attempt=0, prompt_token_ids=b"", prompt=None, seed=99)
    rig.protocol.receive(old, 0.0)
    assert rig.updates["a"] == []


def test_tokens_that_come_twice_are_dropped_without_a_new_start() -> None:
    rig = Rig()
    rig.service.spoil = lambda delta: [delta, delta]
    submit = rig.submit("a", max_tokens=30)
    rig.settle()
    check_answer(submit, rig.updates["a"])
    assert rig.service.seen["Hello"] == rig.service.seen["Submit"] == 1


def test_a_frontend_that_never_sends_what_follows_is_given_up() -> None:
    rig = Rig()
    rig.service.spoil = lambda delta: [Delta(request_id=delta.request_id, start=delta.start + 1, token_ids=b"\0" * 4)]
    rig.submit("a", max_tokens=3)
    for _ in range(MAX_GAPS + 2):
        rig.settle()
    (*_, last) = rig.updates["a"]
    assert isinstance(last, ProtocolError)
    assert str(MAX_GAPS) in str(last)


def test_tokens_that_overlap_in_part_are_asked_for_again_rather_than_cut() -> None:
    rig = Rig()
    submit = rig.submit("a", max_tokens=12)
    is_first = [True]

    def overlap(delta: Delta) -> list[Delta]:
        if delta.start == 4 and is_first:
            is_first.clear()
            tokens = answer_tokens(prompt_ids(submit), 5, 8)[2:]
            return [
                Delta(request_id="a", start=2, token_ids=delta.token_ids[:8] + delta.token_ids, text=text_of(tokens))
            ]
        return [delta]

    rig.service.spoil = overlap
    rig.settle()
    assert not is_first
    check_answer(submit, rig.updates["a"])


def test_what_is_unanswered_is_bounded_in_requests() -> None:
    rig = Rig()
    rig.protocol.receive(HELLO, 0.0)
    for index in range(MAX_UNANSWERED_REQUESTS + 500):
        rig.submit(str(index), max_tokens=1)
    assert len(rig.sent(Submit)) == MAX_UNANSWERED_REQUESTS
    rig.settle()
    for index in range(MAX_UNANSWERED_REQUESTS + 500):
        assert len(rig.updates[str(index)]) == 2


def test_an_old_answer_leaves_a_request_among_those_that_wait_to_be_sent_anew() -> None:
    rig = Rig()
    rig.protocol.receive(HELLO, 0.0)
    ids = [str(index) for index in range(MAX_UNANSWERED_REQUESTS + 1)]
    for request_id in ids:
        rig.submit(request_id, max_tokens=1)
    first = Accepted(request_id="0", attempt=0, prompt_token_ids=b"", prompt=None, seed=1)
    rig.protocol.receive(first, 0.0)  # makes room for the last
    rig.to_frontend.clear()
    rig.protocol.receive(Unknown(), 0.0)
    rig.protocol.receive(HELLO, 0.0)  # room for all but the last
    rig.protocol.receive(msgspec.structs.replace(first, request_id=ids[-1]), 0.0)
    rig.settle()
    assert {request_id for request_id in ids if not isinstance(rig.updates[request_id][-1], Delta)} == set()


def test_what_is_unanswered_is_bounded_in_bytes_but_one_always_goes() -> None:
    rig = Rig()
    rig.protocol.receive(HELLO, 0.0)
    for index in range(5):
        rig.submit(str(index), "x" * (MAX_UNANSWERED_BYTES * 2 // 5), max_tokens=1)
    assert len(rig.sent(Submit)) == 2
    rig.protocol.receive(Accepted(request_id="0", attempt=0, prompt_token_ids=b"", prompt=None, seed=1), 0.0)
    assert len(rig.sent(Submit)) == 3
    for index in range(5):
        rig.protocol.cancel(str(index))
        rig.protocol.receive(Deltas(deltas=[Delta(request_id=str(index), finish_reason="abort")]), 0.0)
    rig.to_frontend.clear()
    rig.submit("big", "x" * (MAX_UNANSWERED_BYTES * 2), max_tokens=1)
    assert len(rig.sent(Submit)) == 1


def test_credits_are_returned_in_batches_and_never_more_than_was_taken() -> None:
    rig = Rig()
    rig.service.tokens_per_delta = 1
    rig.submit("a", max_tokens=CREDIT_BATCH * 3 + 5)
    credits: list[int] = []
    for _ in range(CREDIT_BATCH * 4):
        credits += [message.count for message in rig.to_frontend if isinstance(message, Credit)]
        rig.carry()
        rig.service.generate()
    assert credits == [CREDIT_BATCH] * 3


def test_pings_go_out_only_while_something_is_open() -> None:
    rig = Rig()
    rig.settle()
    assert rig.protocol.tick(5.0) is None
    rig.service.is_paused = True
    rig.submit("a", max_tokens=4)
    rig.settle()
    assert rig.protocol.tick(5.0) == 5.0 + PING_INTERVAL_S
    assert rig.to_frontend == []
    rig.protocol.tick(5.0 + PING_INTERVAL_S)
    assert rig.to_frontend == [Ping()]
    rig.service.is_paused = False
    rig.settle()
    assert rig.protocol.tick(99.0) is None
    assert rig.to_frontend == []


def test_a_frontend_that_leaves_pings_unanswered_is_lost_and_one_pong_is_enough() -> None:
    rig = Rig()
    rig.settle()
    rig.protocol.query(GetInfo(query_id=1), lambda reply: None)
    now = 0.0
    rig.protocol.tick(now)
    for _ in range(int(SILENCE_S)):
        now += PING_INTERVAL_S
        rig.protocol.tick(now)
    assert not rig.protocol.needs_reconnect
    rig.protocol.receive(Pong(), now)
    for _ in range(int(SILENCE_S) + 1):
        assert not rig.protocol.needs_reconnect
        now += PING_INTERVAL_S
        rig.protocol.tick(now)
    assert rig.protocol.needs_reconnect


def test_a_program_that_was_stopped_for_long_does_not_blame_the_frontend() -> None:
    rig = Rig()
    rig.settle()
    rig.service.is_paused = True
    rig.submit("a")
    rig.settle()
    rig.protocol.tick(0.0)
    rig.protocol.tick(1.0)  # a ping; then the program sleeps, and finds the pong before it looks at the clock
    rig.protocol.receive(Pong(), 1000.0)
    rig.protocol.tick(1000.0)
    assert not rig.protocol.needs_reconnect


def test_nobody_at_the_address_is_an_error_that_names_it_and_a_later_submit_tries_again() -> None:
    rig = Rig()
    rig.submit("a")
    assert rig.protocol.tick(9.9) == 10.0
    rig.protocol.tick(10.0)
    (error,) = rig.updates["a"]
    assert isinstance(error, EngineDead)
    assert "ipc://here" in str(error) and "10 s" in str(error) and "engine-launch" in str(error)
    assert rig.protocol.state == "lost"
    submit = rig.submit("b", max_tokens=3)
    assert rig.protocol.needs_reconnect
    rig.now = 11.0
    rig.settle()
    check_answer(submit, rig.updates["b"])


def test_an_engine_that_was_lost_is_waited_for_and_its_requests_go_on() -> None:
    rig = Rig()
    rig.service.max_deltas = 2
    submit = rig.submit("a", max_tokens=20)
    rig.settle()
    rig.service.sessions.clear()
    rig.reopen()
    assert rig.protocol.tick(29.0) == 30.0
    rig.service.is_paused, rig.service.max_deltas = False, None
    rig.settle()
    check_answer(submit, rig.updates["a"])


def test_another_engine_at_the_address_does_not_go_on_with_the_tokens_of_the_first() -> None:
    rig = Rig()
    rig.service.max_deltas = 1
    rig.submit("begun", max_tokens=20)
    rig.settle()
    rig.service.sessions.clear()
    rig.service.run_id = "run-2"
    rig.reopen()
    fresh = rig.submit("fresh", max_tokens=2)
    rig.service.is_paused, rig.service.max_deltas = False, None
    rig.settle()
    assert isinstance(rig.updates["begun"][-1], EngineDead)
    check_answer(fresh, rig.updates["fresh"])


@pytest.mark.parametrize("was_sent", [False, True])
def test_an_abort_ends_a_request_at_once_when_no_frontend_holds_it(was_sent: bool) -> None:
    rig = Rig()
    rig.service.is_paused = True
    if was_sent:
        rig.settle()
    rig.submit("a")
    if was_sent:
        rig.settle()
        rig.reopen()
    rig.protocol.abort("a")
    last = rig.updates["a"][-1]
    assert isinstance(last, Delta) and last.finish_reason == "abort"
    rig.settle()
    assert all(not session.running for session in rig.service.sessions.values())
    assert not rig.protocol.is_busy


def test_an_abort_is_answered_by_the_frontend_and_a_cancelled_request_hears_nothing() -> None:
    rig = Rig()
    rig.service.is_paused = True
    rig.submit("a")
    rig.submit("b")
    rig.settle()
    rig.protocol.abort("a")
    rig.protocol.cancel("b")
    rig.protocol.abort("unknown")
    rig.settle()
    assert [getattr(update, "finish_reason", "") for update in rig.updates["a"]] == ["", "abort"]
    assert len(rig.updates["b"]) == 1
    assert not rig.protocol.is_busy


def test_an_id_that_is_open_is_refused_and_may_be_used_again_later() -> None:
    rig = Rig()
    first = rig.submit("a", max_tokens=3)
    first_updates = rig.updates["a"]
    rig.submit("a")
    (error,) = rig.updates["a"]
    assert isinstance(error, RequestError)
    rig.settle()
    check_answer(first, first_updates)
    again = rig.submit("a", max_tokens=3)
    rig.settle()
    check_answer(again, rig.updates["a"])


def test_requests_on_one_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.frontend.client.protocol.MAX_OPEN_REQUESTS", 3)
    rig = Rig()
    for index in range(4):
        rig.submit(str(index))
    assert isinstance(rig.updates["3"][0], Overloaded)
    assert rig.updates["2"] == []


@pytest.mark.parametrize(
    "refusal",
    [
        Refused(error=ErrorInfo("protocol", "the client speaks protocol version 1, this engine speaks 2: mend it")),
        Welcome(protocol_version=2, run_id="x"),
    ],
)
def test_another_protocol_version_ends_everything_with_both_numbers(refusal: Refused | Welcome) -> None:
    rig = Rig()
    rig.submit("a")
    replies: list[QueryResult] = []
    rig.protocol.query(GetInfo(query_id=1), replies.append)
    rig.protocol.receive(refusal, 0.0)
    for error in (rig.updates["a"][0], replies[0]):
        assert isinstance(error, ProtocolError)
        assert str(error).count("speaks protocol") == 1, "it is said once"
        assert re.fullmatch(
            r"the (client|engine) speaks protocol version \d, this (client|engine) speaks \d: .*", str(error)
        )
    rig.submit("b")
    assert isinstance(rig.updates["b"][0], ProtocolError)


def test_queries_are_asked_again_after_a_loss_and_answered_once() -> None:
    rig = Rig()
    rig.settle()
    replies: list[QueryResult] = []
    rig.protocol.query(GetInfo(query_id=1), replies.append)
    rig.reopen()
    rig.settle()
    assert len(replies) == 1 and isinstance(replies[0], Info)


def test_an_end_reaches_all_that_is_open_and_all_that_comes() -> None:
    rig = Rig()
    rig.submit("a")
    rig.protocol.end(EngineDead("exit code 7"))
    rig.protocol.end(EngineDead("later words"))
    rig.submit("b")
    rig.protocol.receive(Deltas(deltas=[]), 0.0)
    for request_id in "ab":
        (error,) = rig.updates[request_id]
        assert isinstance(error, TokenloomError) and "7" in str(error)
