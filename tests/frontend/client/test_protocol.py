"""ClientProtocol: each token once despite losses; bounds, pings, timeouts and ends."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from tokenloom.frontend.client.keepalive import SILENCE_S
from tokenloom.frontend.client.protocol import CREDIT_BATCH, MAX_GAPS, QueryResult
from tokenloom.frontend.client.submit_window import MAX_UNANSWERED_BYTES, MAX_UNANSWERED_REQUESTS
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.errors import EngineDead, ErrorInfo, Overloaded, ProtocolError, RequestError, TokenloomError
from tokenloom.ipc.messages.base import PING_INTERVAL_S, Hello, Ping, Pong, Refused, Unknown, Welcome
from tokenloom.ipc.messages.client import Credit, Delta, Deltas, GetInfo, Info, Submit
from tokenloom.tests.frontend.fake_frontend import answer_tokens, prompt_ids
from tokenloom.tests.frontend.server.requests.rig import HELLO, Rig, accepted, check_answer


def walk(rig: Rig, rng: random.Random, num_steps: int, submit: Callable[[int], Submit]) -> list[Submit]:
    """Submit, lose sessions, reconnect and deliver messages at random, to the end; return the submits."""
    submits = []
    for step in range(num_steps):
        match rng.randrange(10):
            case 0:
                submits.append(submit(step))
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
    for _ in range(MAX_GAPS):  # a reconnect reveals losses at the end
        rig.settle()
        rig.reopen()
    rig.settle()
    assert not rig.protocol.is_busy
    return submits


@pytest.mark.parametrize("seed", range(60))
def test_each_token_is_delivered_once_and_in_order_despite_loss_and_repetition(seed: int) -> None:
    rng, rig = random.Random(seed), Rig()
    rig.service.tokens_per_delta = rng.randint(1, 5)

    def spoil(delta: Delta) -> list[Delta]:
        dice = rng.random()
        return [] if dice < 0.03 and delta.finish_reason is None else [delta, delta] if dice < 0.15 else [delta]

    rig.service.spoil = spoil
    for submit in walk(rig, rng, 300, lambda step: rig.submit(f"r{step}", max_tokens=rng.randint(1, 40))):
        check_answer(submit, rig.updates[submit.request_id])


@pytest.mark.parametrize("seed", range(10))
def test_a_request_keeps_its_adapter_through_losses_while_the_name_is_given_to_others(seed: int) -> None:
    rng, rig = random.Random(seed), Rig()

    def submit(step: int) -> Submit:
        rig.service.digest_by_adapter["sql"] = bytes([rng.randint(1, 4)])
        return rig.submit(f"r{step}", f"prompt {step}", "sql", max_tokens=rng.randint(1, 40))

    for each in walk(rig, rng, 200, submit):
        deltas = [update for update in rig.updates[each.request_id] if isinstance(update, Delta)]
        tokens = [token for delta in deltas for token in decode_ids(delta.token_ids)]
        prompt, num_tokens = prompt_ids(each), each.params.max_tokens or 0
        assert tokens in [answer_tokens(prompt, 5 + digest, num_tokens) for digest in range(1, 5)]


def test_several_unknowns_cause_one_hello() -> None:
    rig = Rig()
    rig.settle()
    rig.hear(*[Unknown()] * 3)
    assert len(rig.sent(Hello)) == 1


def test_accepted_of_an_older_attempt_is_ignored() -> None:
    rig = Rig()
    rig.hear(HELLO)
    rig.submit("a")
    rig.reopen()
    rig.hear(HELLO, accepted())
    assert rig.updates["a"] == []


def test_a_request_fails_after_too_many_gaps() -> None:
    rig = Rig()
    rig.service.spoil = lambda delta: [Delta(request_id=delta.request_id, start=delta.start + 1, token_ids=b"\0" * 4)]
    rig.submit("a", max_tokens=3)
    for _ in range(MAX_GAPS + 2):
        rig.settle()
    (*_, last) = rig.updates["a"]
    assert isinstance(last, ProtocolError)
    assert str(MAX_GAPS) in str(last)


def test_the_window_bounds_unanswered_requests() -> None:
    rig = Rig()
    rig.hear(HELLO)
    for index in range(MAX_UNANSWERED_REQUESTS + 500):
        rig.submit(str(index), max_tokens=1)
    assert len(rig.sent(Submit)) == MAX_UNANSWERED_REQUESTS
    rig.settle()
    for index in range(MAX_UNANSWERED_REQUESTS + 500):
        assert len(rig.updates[str(index)]) == 2


def test_accepted_of_an_older_attempt_leaves_the_request_in_the_queue() -> None:
    rig = Rig()
    rig.hear(HELLO)
    ids = [str(index) for index in range(MAX_UNANSWERED_REQUESTS + 1)]
    for request_id in ids:
        rig.submit(request_id, max_tokens=1)
    rig.hear(accepted("0"))  # makes space for the last
    rig.to_frontend.clear()
    rig.hear(Unknown(), HELLO)  # space for all but the last
    rig.hear(accepted(ids[-1]))
    rig.settle()
    assert {request_id for request_id in ids if not isinstance(rig.updates[request_id][-1], Delta)} == set()


def test_the_window_bounds_unanswered_bytes_but_admits_one_request_of_any_size() -> None:
    rig = Rig()
    rig.hear(HELLO)
    for index in range(5):
        rig.submit(str(index), "x" * (MAX_UNANSWERED_BYTES * 2 // 5), max_tokens=1)
    assert len(rig.sent(Submit)) == 2
    rig.hear(accepted("0"))
    assert len(rig.sent(Submit)) == 3
    for index in range(5):
        rig.protocol.cancel(str(index))
        rig.hear(Deltas(deltas=[Delta(request_id=str(index), finish_reason="abort")]))
    rig.to_frontend.clear()
    rig.submit("big", "x" * (MAX_UNANSWERED_BYTES * 2), max_tokens=1)
    assert len(rig.sent(Submit)) == 1


def test_credits_are_batched_and_never_exceed_the_received_messages() -> None:
    rig = Rig()
    rig.service.tokens_per_delta = 1
    rig.submit("a", max_tokens=CREDIT_BATCH * 3 + 5)
    credits: list[int] = []
    for _ in range(CREDIT_BATCH * 4):
        credits += [message.count for message in rig.to_frontend if isinstance(message, Credit)]
        rig.carry()
        rig.service.generate()
    assert credits == [CREDIT_BATCH] * 3


def test_pings_are_sent_only_while_something_is_open() -> None:
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


def test_a_frontend_is_lost_after_silence_and_one_pong_prevents_it() -> None:
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


def test_a_suspended_program_does_not_report_its_frontend_as_lost() -> None:
    rig = Rig()
    rig.settle()
    rig.service.is_paused = True
    rig.submit("a")
    rig.settle()
    rig.protocol.tick(0.0)
    rig.protocol.tick(1.0)  # a ping; then the program is suspended, and receives the pong before the tick
    rig.protocol.receive(Pong(), 1000.0)
    rig.protocol.tick(1000.0)
    assert not rig.protocol.needs_reconnect


def test_without_an_engine_the_error_names_the_address_and_a_later_submit_retries() -> None:
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


@pytest.mark.parametrize("model_digest", ["", "m"])
def test_another_engine_goes_on_with_the_tokens_of_the_first_only_if_it_has_the_same_model(model_digest: str) -> None:
    rig = Rig()
    rig.service.model_digest, rig.service.max_deltas = model_digest, 1
    begun = rig.submit("begun", max_tokens=20)
    rig.settle()
    rig.service.run_id = "run-2"
    rig.lose_sessions()
    fresh = rig.submit("fresh", max_tokens=2)
    rig.serve()
    check_answer(fresh, rig.updates["fresh"])
    if model_digest:
        check_answer(begun, rig.updates["begun"])
    else:
        assert isinstance(rig.updates["begun"][-1], EngineDead)


@pytest.mark.parametrize("was_sent", [False, True])
def test_an_abort_ends_a_request_at_once_if_no_frontend_has_it(was_sent: bool) -> None:
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


def test_the_frontend_ends_an_aborted_request_and_a_cancelled_one_gets_no_update() -> None:
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


def test_an_open_request_id_is_refused_until_its_request_ends() -> None:
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


def test_requests_on_one_client_are_bounded() -> None:
    rig = Rig(max_open_requests=3)
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
def test_another_protocol_version_is_an_error_with_both_numbers(refusal: Refused | Welcome) -> None:
    rig = Rig()
    rig.submit("a")
    replies: list[QueryResult] = []
    rig.protocol.query(GetInfo(query_id=1), replies.append)
    rig.hear(refusal)
    for error in (rig.updates["a"][0], replies[0]):
        assert isinstance(error, ProtocolError)
        assert str(error).count("speaks protocol") == 1, "it is said once"
        assert re.fullmatch(
            r"the (client|engine) speaks protocol version \d, this (client|engine) speaks \d: .*", str(error)
        )
    rig.submit("b")
    assert isinstance(rig.updates["b"][0], ProtocolError)


def test_queries_are_sent_again_after_a_loss_and_get_one_reply() -> None:
    rig = Rig()
    rig.settle()
    replies: list[QueryResult] = []
    rig.protocol.query(GetInfo(query_id=1), replies.append)
    rig.reopen()
    rig.settle()
    assert len(replies) == 1 and isinstance(replies[0], Info)


def test_the_end_of_a_client_fails_open_and_later_requests() -> None:
    rig = Rig()
    rig.submit("a")
    rig.protocol.end(EngineDead("exit code 7"))
    rig.protocol.end(EngineDead("later words"))
    rig.submit("b")
    rig.hear(Deltas(deltas=[]))
    for request_id in "ab":
        (error,) = rig.updates[request_id]
        assert isinstance(error, TokenloomError) and "7" in str(error)
