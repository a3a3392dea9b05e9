"""The Frontend between clients and a core that the test plays itself, message by message."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.chat import ChatTemplate
from tokenloom.frontend.service import Frontend
from tokenloom.frontend.tokenizer import Tokenizer
from tokenloom.ipc.codec import Decoder, decode_ids, encode, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages import (
    CREDIT_WINDOW,
    LEASE_S,
    PROTOCOL_VERSION,
    Abort,
    AbortRequests,
    Accepted,
    ChatMessage,
    Child,
    ClientMessage,
    Credit,
    Delta,
    Deltas,
    Detokenize,
    Drain,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FrontendMessage,
    GetHealth,
    GetInfo,
    Health,
    Hello,
    Info,
    Initialize,
    Ping,
    Pong,
    Progress,
    QueryFailed,
    Refused,
    Started,
    Submit,
    Text,
    TokenIds,
    Tokenize,
    Unknown,
    Welcome,
)
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.engine_specs import new_spec

from .samples import new_tokenizer

DEADLINE_S = 20.0
TOKENIZER = new_tokenizer("byte_level")
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})


class Bench:
    """A Frontend with a clock that the test turns, a core that is the test, and decoded answers per client."""

    def __init__(self, tokenizer: Tokenizer | None = TOKENIZER, is_core_up: bool = True, **spec: Any) -> None:
        self.now = 100.0
        self.is_awake = threading.Event()
        self.frontend = Frontend(
            new_spec(**spec),
            tokenizer,
            TEMPLATE,
            self.is_awake.set,
            monotonic=lambda: self.now,
            unix_time=lambda: self.now + 1e9,
        )
        self.to_core: list[Any] = []
        self.num_core_pings = 0
        self.messages_by_client: dict[bytes, list[FrontendMessage]] = {}
        self._decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self.frontend.connect()
        if is_core_up:
            self.frontend.on_core_message(Welcome(protocol_version=PROTOCOL_VERSION, run_id="r"))
        self.turn()
        self.to_core.clear()

    def turn(self) -> None:
        self.frontend.tick(self.now)
        for identity, frame in self.frontend.outbox.to_clients:
            self.messages_by_client.setdefault(identity, []).append(self._decoder.decode(frame))
        self.to_core += [message for message in self.frontend.outbox.to_core if not isinstance(message, Ping)]
        self.num_core_pings += sum(isinstance(message, Ping) for message in self.frontend.outbox.to_core)
        self.frontend.outbox.to_clients.clear()
        self.frontend.outbox.to_core.clear()

    def wait(self, seconds: float) -> None:
        """Let time pass in a loop that turns as it should."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.turn()

    def say(self, *messages: ClientMessage, client: bytes = b"c") -> list[FrontendMessage]:
        """Messages of a client in one turn; returns what it hears, and forgets it."""
        for message in messages:
            self.frontend.on_client_frame(client, encode(message))
        self.turn()
        return self.heard(client)

    def hello(self, client: bytes = b"c") -> None:
        assert isinstance(self.say(Hello(protocol_version=PROTOCOL_VERSION), client=client)[-1], Welcome)

    def heard(self, client: bytes = b"c") -> list[FrontendMessage]:
        return self.messages_by_client.pop(client, [])

    def deltas(self, client: bytes = b"c") -> list[Delta]:
        return [delta for message in self.heard(client) if isinstance(message, Deltas) for delta in message.deltas]

    def core(self, **columns: Any) -> None:
        """A message of the core, and the end of the turn."""
        self.frontend.on_core_message(EngineCoreOutputs(**columns))
        self.turn()

    def tokens(self, *entries: tuple[int, int, Sequence[int]], **more: Any) -> None:
        """The core's tokens as (key, start, ids)."""
        self.core(
            keys=encode_ids(key for key, _, _ in entries),
            starts=encode_ids(start for _, start, _ in entries),
            counts=encode_ids(len(ids) for _, _, ids in entries),
            token_ids=encode_ids(token_id for _, _, ids in entries for token_id in ids),
            **more,
        )

    def submit(self, request_id: str = "r", client: bytes = b"c", accept: bool = True, **fields: Any) -> int:
        """Submit and have the core accept; returns the key."""
        self.frontend.on_client_frame(client, encode(new_submit(request_id, **fields)))
        self.turn()
        request = self.to_core[-1]
        assert isinstance(request, EngineCoreRequest)
        key = request.children[0].key
        if accept:
            self.core(accepted=[key])
            self.heard(client)
        return key

    def aborted(self) -> list[int]:
        keys = [key for message in self.to_core if isinstance(message, AbortRequests) for key in message.keys]
        self.to_core.clear()
        return keys


def new_submit(request_id: str = "r", **fields: Any) -> Submit:
    params = SamplingParams(**fields.pop("params", {}))
    if not fields.keys() & {"prompt", "prompt_token_ids", "chat"}:
        fields["prompt"] = "The capital"
    return Submit(request_id=request_id, params=params, **fields)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.hello()
    return bench


# ── the life of a request ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_goes_to_the_core_and_its_text_comes_back(bench: Bench) -> None:
    key = bench.submit(params={"max_tokens": 5, "seed": 7}, accept=False)
    request = bench.to_core[-1]
    assert decode_ids(request.prompt_token_ids).tolist() == ids("The capital")
    assert (request.max_tokens, request.stop_token_ids, request.children[0].seed) == (5, [2], 7)
    assert bench.heard() == []

    bench.core(accepted=[key], started=[Started(key=key, num_cached_tokens=16)])
    assert bench.heard() == [
        Accepted(
            request_id="r",
            attempt=0,
            prompt_token_ids=encode_ids(ids("The capital")),
            prompt="The capital",
            seed=7,
        )
    ]
    answer = ids(" of France")
    bench.now += 0.5
    bench.tokens((key, 0, answer[:1]))
    (first,) = bench.deltas()
    assert first.metrics is not None and first.num_cached_tokens == 16 and first.finish_reason is None
    assert (first.metrics.arrival_time, first.metrics.first_token_time) == (1e9 + 100, 1e9 + 100.5)
    bench.now += 0.5
    bench.tokens((key, 1, answer[1:]))
    (second,) = bench.deltas()
    assert second.metrics is None and second.start == 1 and second.token_ids == encode_ids(answer[1:])
    bench.now += 0.5
    bench.core(finished=[Finished(key=key, reason="length", num_preemptions=3)])
    (last,) = bench.deltas()
    assert first.text + second.text + last.text == " of France"
    assert last.metrics is not None and last.finish_reason == "length" and last.stop_reason is None
    assert (last.metrics.finished_time, last.metrics.num_preemptions) == (1e9 + 101.5, 3)
    assert bench.frontend.num_open_requests == 0 and bench.aborted() == []


def test_all_requests_of_a_client_share_one_message_per_turn(bench: Bench) -> None:
    keys = [bench.submit(f"r{i}") for i in range(5)]
    bench.tokens(*((key, 0, ids("The")) for key in keys))
    (message,) = bench.heard()
    assert isinstance(message, Deltas) and [delta.request_id for delta in message.deltas] == [f"r{i}" for i in range(5)]


def test_end_token_ends_without_reason_and_a_stop_token_is_named(bench: Bench) -> None:
    for stop, reason in ((2, None), (50, 50)):
        key = bench.submit(params={"stop_token_ids": [50]})
        bench.tokens((key, 0, [*ids("The"), stop]), finished=[Finished(key=key, reason="stop")])
        (delta,) = bench.deltas()
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("The", "stop", reason)
        assert decode_ids(delta.token_ids).tolist() == [*ids("The"), stop]


def test_a_stop_string_cuts_the_text_keeps_its_token_and_tells_the_core(bench: Bench) -> None:
    key = bench.submit(params={"stop": ["pan", "nic"]})
    tokens = [ids(character)[0] for character in "Don't panic!"]
    bench.tokens((key, 0, tokens[:7]))
    (held,) = bench.deltas()
    assert held.text == "Don't " and len(decode_ids(held.token_ids)) == 7
    bench.tokens((key, 7, tokens[7:]))
    (last,) = bench.deltas()
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "pan")
    assert decode_ids(last.token_ids).tolist() == tokens[7:9]
    assert bench.aborted() == [key]
    bench.tokens((key, 12, tokens), finished=[Finished(key=key, reason="length")])
    assert bench.heard() == [] and bench.frontend.num_open_requests == 0


def test_a_stop_string_is_not_seen_before_min_tokens(bench: Bench) -> None:
    key = bench.submit(params={"stop": "a", "min_tokens": 4, "include_stop_str_in_output": True})
    tokens = [ids(character)[0] for character in "ababa"]
    bench.tokens((key, 0, tokens))
    (delta,) = bench.deltas()
    assert (delta.text, delta.stop_reason) == ("ababa", "a")


def test_text_held_back_comes_out_at_the_end(bench: Bench) -> None:
    key = bench.submit(params={"stop": "Paris!"})
    bench.tokens((key, 0, ids("Paris")))
    assert [delta.text for delta in bench.deltas()] == [""]
    bench.core(finished=[Finished(key=key, reason="length")])
    assert [(delta.text, delta.finish_reason) for delta in bench.deltas()] == [("Paris", "length")]


def test_ids_alone_are_served_without_a_tokenizer() -> None:
    bench = Bench(tokenizer=None)
    bench.hello()
    key = bench.submit(prompt_token_ids=encode_ids([5, 6, 7]), params={"stop_token_ids": [9]})
    bench.tokens((key, 0, [8, 9]), finished=[Finished(key=key, reason="stop")])
    (delta,) = bench.deltas()
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("", encode_ids([8, 9]), 9)


def test_a_chat_is_rendered_and_its_text_reported(bench: Bench) -> None:
    key = bench.submit(chat=[ChatMessage("user", "The "), ChatMessage("user", "test")], accept=False)
    bench.core(accepted=[key])
    (accepted,) = bench.heard()
    assert isinstance(accepted, Accepted) and accepted.prompt == "The test"


# ── long prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def wait_for_wakeup(bench: Bench) -> None:
    assert bench.is_awake.wait(DEADLINE_S)
    bench.is_awake.clear()
    bench.frontend.on_wakeup()
    bench.turn()


def test_a_long_prompt_is_tokenized_aside_and_short_ones_go_past_it() -> None:
    bench = Bench(max_model_len=100_000)
    bench.hello()
    text = "The capital of France is Paris. " * 300
    assert bench.say(new_submit("long", prompt=text)) == [] and bench.to_core == []
    bench.submit("short")
    bench.to_core.clear()
    wait_for_wakeup(bench)
    assert decode_ids(bench.to_core[0].prompt_token_ids).tolist() == TOKENIZER.encode(text)


def test_a_long_prompt_that_was_aborted_or_fails_ends_as_such(bench: Bench) -> None:
    text = "x " * 3000
    assert [d.finish_reason for d in _deltas(bench.say(new_submit("a", prompt=text), Abort(request_id="a")))] == [
        "abort"
    ]
    wait_for_wakeup(bench)
    assert bench.heard() == [] and bench.to_core == []
    bench.say(new_submit("b", prompt=text))
    wait_for_wakeup(bench)
    (delta,) = bench.deltas()
    assert delta.request_id == "b" and delta.error is not None and "max_model_len is 512" in delta.error.message


def _deltas(messages: list[FrontendMessage]) -> list[Delta]:
    return [delta for message in messages if isinstance(message, Deltas) for delta in message.deltas]


# ── credits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_does_not_read_gets_its_news_merged_and_slows_nobody(bench: Bench) -> None:
    bench.hello(b"slow")
    slow, quick = bench.submit("s", client=b"slow"), bench.submit("q")
    tokens = [random.Random(1).randrange(4, 400) for _ in range(1000)]
    for start, token_id in enumerate(tokens):
        bench.tokens((slow, start, [token_id]), (quick, start, [token_id]))
        bench.say(Credit(count=1))
        bench.now += 0.001
    unread = bench.heard(b"slow")
    assert len(unread) == CREDIT_WINDOW
    (merged,) = _deltas(bench.say(Credit(count=CREDIT_WINDOW), client=b"slow"))
    assert merged.start == CREDIT_WINDOW and decode_ids(merged.token_ids).tolist() == tokens[CREDIT_WINDOW:]
    assert "".join(delta.text for delta in [*_deltas(unread), merged]) == TOKENIZER.decode(tokens).rstrip("\ufffd")


def test_a_negative_credit_is_refused(bench: Bench) -> None:
    (refused,) = bench.say(Credit(count=-5))
    assert isinstance(refused, Refused) and "-5" in refused.error.message


# ── clients that die, come back, and repeat themselves ───────────────────────────────────────────────────────────────


def test_silence_counts_only_while_requests_are_open(bench: Bench) -> None:
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


def test_a_client_without_requests_outlives_the_leases_of_others(bench: Bench) -> None:
    bench.hello(b"idle")
    bench.submit()
    for _ in range(10):
        bench.now += 1
        bench.say(Ping())
    assert bench.say(Ping(), client=b"idle") == [Pong()]


def test_no_client_is_silent_before_all_is_read(bench: Bench) -> None:
    bench.submit()
    for _ in range(10):
        bench.now += 1
        bench.frontend.tick(bench.now, check_leases=False)
    assert bench.frontend.num_open_requests == 1
    bench.turn()
    assert bench.frontend.num_open_requests == 0


def test_a_loop_that_stood_still_holds_nobodys_silence_against_it(bench: Bench) -> None:
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


def test_a_client_that_is_gone_loses_its_requests_and_no_other(bench: Bench) -> None:
    bench.hello(b"d")
    mine, other = bench.submit(), bench.submit(client=b"d")
    bench.to_core.clear()
    bench.frontend.on_client_gone(b"c")
    bench.turn()
    assert bench.aborted() == [mine]
    bench.tokens((mine, 0, ids("The")), (other, 0, ids("The")))
    assert bench.heard() == [] and len(bench.deltas(b"d")) == 1


def test_abort_answers_with_the_last_delta_and_unknown_ids_with_nothing(bench: Bench) -> None:
    key = bench.submit()
    (delta,) = _deltas(bench.say(Abort(request_id="r")))
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


def test_another_request_under_an_open_id_is_refused_and_the_first_goes_on(bench: Bench) -> None:
    key = bench.submit()
    (refused,) = bench.say(new_submit(prompt="something else"))
    assert isinstance(refused, Refused) and "is open already" in refused.error.message
    bench.tokens((key, 0, ids("The")))
    assert len(bench.deltas()) == 1


def test_a_higher_attempt_replaces_silently(bench: Bench) -> None:
    first = bench.submit(accept=False)
    second = bench.submit(attempt=1)
    assert bench.aborted() == [first]
    bench.tokens((first, 0, ids("x")), (second, 0, ids("The")), finished=[Finished(key=first, reason="abort")])
    assert [delta.text for delta in bench.deltas()] == ["The"]


def test_news_of_a_replaced_attempt_that_were_not_sent_yet_are_never_sent(bench: Bench) -> None:
    first = bench.submit()
    for start in range(CREDIT_WINDOW + 1):
        bench.tokens((first, start, [40]))
    bench.heard()
    second = bench.submit(attempt=1)
    bench.tokens((second, 0, ids("The")))
    (delta,) = _deltas(bench.say(Credit(count=CREDIT_WINDOW)))
    assert delta.start == 0 and delta.text == "The"


def test_the_same_id_of_two_clients_is_two_requests(bench: Bench) -> None:
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
    assert isinstance(messages[0], Welcome) and _deltas(messages)[0].start == CREDIT_WINDOW


# ── resume ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("params", [{}, {"stop": ["is P", "Madrid."]}, {"min_tokens": 9, "stop": "is"}])
def test_a_resumed_answer_goes_on_where_it_was_at_any_cut(params: dict[str, Any]) -> None:
    """The text that the client has plus what comes after the resume is the text of a calm run."""
    tokens = [token_id for character in "漢 France is Paris, Spain is Madrid." for token_id in ids(character)]
    calm = Bench()
    calm.hello()
    key = calm.submit(params={**params, "max_tokens": 200, "seed": 3})
    pieces: list[Delta] = []
    for start, token_id in enumerate(tokens):
        calm.tokens((key, start, [token_id]))
        pieces += calm.deltas()
    calm.core(finished=[Finished(key=key, reason="length")])
    pieces += calm.deltas()
    assert pieces[-1].finish_reason == ("stop" if params else "length")
    for cut in range(len(pieces) - 1):
        bench = Bench()
        bench.hello()
        had = pieces[:cut]
        child = Child(index=0, seed=3, output_token_ids=b"".join(delta.token_ids for delta in had))
        key = bench.submit(params={**params, "max_tokens": 200, "seed": 3}, attempt=1, children=[child])
        assert bench.to_core[-1].children[0].output_token_ids == child.output_token_ids
        bench.tokens((key, max(cut - 2, 0), tokens[max(cut - 2, 0) :]))  # a core may repeat what is known
        bench.core(finished=[Finished(key=key, reason="length")])
        rest = bench.deltas()
        assert rest[0].start == cut
        for name in ("token_ids", "text"):
            joined = getattr(had[0], name)[:0] if had else getattr(rest[0], name)[:0]
            for delta in [*had, *rest]:
                joined += getattr(delta, name)
            assert joined == calm_join(pieces, name)
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (pieces[-1].finish_reason, pieces[-1].stop_reason)


def calm_join(pieces: list[Delta], name: str) -> Any:
    joined = getattr(pieces[0], name)
    for delta in pieces[1:]:
        joined += getattr(delta, name)
    return joined


def test_resumed_tokens_that_meet_a_stop_string_end_at_once_without_the_core(bench: Bench) -> None:
    bench.to_core.clear()
    child = Child(seed=1, output_token_ids=encode_ids(ids("Paris")))
    accepted, deltas = bench.say(new_submit(params={"stop": "Par"}, attempt=1, children=[child]))
    assert isinstance(accepted, Accepted) and bench.to_core == []
    assert isinstance(deltas, Deltas) and (deltas.deltas[0].finish_reason, deltas.deltas[0].text) == ("stop", "")


def test_each_of_several_answers_is_resumed_and_ends_alone(bench: Bench) -> None:
    children = [Child(index=i, seed=i, output_token_ids=encode_ids(ids("The")[:i])) for i in range(2)]
    key = bench.submit(attempt=1, children=children)
    (zero, one) = (child.key for child in bench.to_core[-1].children)
    assert key == zero
    bench.tokens((zero, 0, ids("Don")), (one, 1, ids("x")), finished=[Finished(key=one, reason="length")])
    assert [(d.index, d.start, d.finish_reason) for d in bench.deltas()] == [(0, 0, None), (1, 1, "length")]
    assert bench.frontend.num_open_requests == 1
    bench.core(finished=[Finished(key=zero, reason="stop")])
    assert bench.deltas()[0].index == 0 and bench.frontend.num_open_requests == 0


# ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_that_are_known_are_dropped_and_a_gap_ends_that_request_alone(bench: Bench) -> None:
    mine, other = bench.submit("a"), bench.submit("b")
    bench.tokens((mine, 0, [40, 41]), (other, 0, [40]))
    bench.tokens((mine, 1, [41, 42]), (mine, 0, [40]))
    deltas = bench.deltas()
    assert [decode_ids(d.token_ids).tolist() for d in deltas] == [[40, 41], [40], [42]]
    bench.aborted()
    bench.tokens((mine, 5, [43]), (other, 1, [41]))
    broken, whole = bench.deltas()
    assert broken.error is not None and broken.error.kind == "internal" and "5 on, 3 are known" in broken.error.message
    assert whole.finish_reason is None and bench.aborted() == [mine]


def test_a_core_that_does_not_know_us_gets_everything_again_with_its_tokens(bench: Bench) -> None:
    key = bench.submit(params={"seed": 9})
    bench.tokens((key, 0, [40, 41, 42]))
    bench.heard()
    bench.to_core.clear()
    bench.frontend.on_core_message(Unknown())
    bench.frontend.on_core_message(Unknown())
    bench.turn()
    (hello,) = bench.to_core
    assert isinstance(hello, Hello) and hello.fingerprint and not bench.frontend.is_ready
    bench.say(new_submit("later"))
    bench.frontend.on_core_message(Welcome(protocol_version=PROTOCOL_VERSION, run_id="r"))
    bench.turn()
    first, second = [message for message in bench.to_core if isinstance(message, EngineCoreRequest)]
    assert first.children[0].output_token_ids == encode_ids([40, 41, 42]) and first.children[0].seed == 9
    bench.core(accepted=[first.children[0].key, second.children[0].key])
    (accepted,) = bench.heard()
    assert isinstance(accepted, Accepted) and accepted.request_id == "later"
    bench.tokens((first.children[0].key, 3, [43]))
    assert bench.deltas()[0].start == 3


def test_columns_that_disagree_are_counted_and_change_nothing(bench: Bench) -> None:
    key = bench.submit()
    good = {
        "keys": encode_ids([key]),
        "starts": encode_ids([0]),
        "counts": encode_ids([1]),
        "token_ids": encode_ids([40]),
    }
    for bad in ({"keys": b"\1"}, {"counts": encode_ids([2])}, {"counts": encode_ids([-1])}, {"starts": b""}):
        bench.core(**{**good, **bad})
        assert bench.heard() == []
    assert bench.frontend.counts["malformed_core_frames"] == 4
    bench.core(**good)
    assert len(bench.deltas()) == 1


def test_a_request_that_the_core_refuses_ends_with_its_error(bench: Bench) -> None:
    key = bench.submit(accept=False)
    error = ErrorInfo("overloaded", "65536 requests wait", 2.5)
    bench.core(finished=[Finished(key=key, reason="error", error=error)])
    (delta,) = bench.deltas()
    assert (delta.finish_reason, delta.error) == ("error", error)


def test_requests_wait_for_a_core_that_is_not_up_yet() -> None:
    bench = Bench(is_core_up=False)
    bench.hello()
    bench.say(new_submit())
    assert bench.to_core == []
    bench.frontend.on_core_message(Welcome(protocol_version=PROTOCOL_VERSION, run_id="r"))
    bench.turn()
    assert isinstance(bench.to_core[0], EngineCoreRequest)


def test_the_core_is_pinged_only_while_it_has_requests(bench: Bench) -> None:
    bench.now += 10
    bench.turn()
    assert bench.num_core_pings == 0
    bench.submit()
    for _ in range(100):
        bench.now += 0.1
        bench.say(Ping())
    assert 10 <= bench.num_core_pings <= 12


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_protocol_version_is_refused_with_both_named(bench: Bench) -> None:
    (refused,) = bench.say(Hello(protocol_version=99), client=b"other")
    assert isinstance(refused, Refused) and "99" in refused.error.message
    assert f"speaks {PROTOCOL_VERSION}" in refused.error.message
    assert bench.say(Ping(), client=b"other") == [Unknown()]


def test_a_message_before_hello_is_answered_with_unknown(bench: Bench) -> None:
    assert bench.say(new_submit(), client=b"other") == [Unknown()] and bench.to_core == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"params": {"temperature": -1}}, r"temperature must be in \[0, 100\], got -1"),
        ({"params": {"top_p": 0}}, "top_p must be in"),
        ({"params": {"tempurature": 1}}, "tempurature"),
        ({"params": {"max_tokens": "many"}}, r"params\.max_tokens"),
        ({"prompt": 5}, r"\$\.prompt"),
    ],
)
def test_a_bad_field_is_named_under_the_id_of_its_request(bench: Bench, change: dict[str, Any], reason: str) -> None:
    raw = {"type": "submit", "request_id": "mine", "params": {}, "prompt": "x", **change}
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode(raw))
    bench.turn()
    (delta,) = bench.deltas()
    assert delta.request_id == "mine" and delta.finish_reason == "error" and delta.error is not None
    assert delta.error.kind == "request"
    assert re.search(reason, delta.error.message)


def test_a_bad_message_under_an_open_id_does_not_end_that_request(bench: Bench) -> None:
    key = bench.submit()
    bench.frontend.on_client_frame(b"c", msgspec.msgpack.encode({"type": "submit", "request_id": "r", "params": 5}))
    bench.tokens((key, 0, ids("The")))
    refused, deltas = bench.heard()
    assert isinstance(refused, Refused) and isinstance(deltas, Deltas) and deltas.deltas[0].text == "The"


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_a_request_id_must_have_a_sensible_length(bench: Bench, request_id: str) -> None:
    (delta,) = _deltas(bench.say(new_submit(request_id)))
    assert delta.error is not None and "must have 1 to 256" in delta.error.message


def test_a_request_error_touches_no_other_request(bench: Bench) -> None:
    key = bench.submit("good")
    (delta,) = _deltas(bench.say(new_submit("bad", prompt_token_ids=encode_ids([5000]))))
    assert delta.error is not None and "5000" in delta.error.message and bench.aborted() == []
    bench.tokens((key, 0, ids("The")))
    assert bench.deltas()[0].text == "The"


def test_while_draining_only_resumed_requests_are_taken(bench: Bench) -> None:
    bench.frontend.on_control_message(Drain())
    (delta,) = _deltas(bench.say(new_submit()))
    assert delta.error is not None and delta.error.kind == "draining" and delta.error.retry_after_s > 0
    bench.submit("resumed", attempt=1, children=[Child(seed=1, output_token_ids=encode_ids([40]))])


def test_when_the_engine_stops_every_open_request_is_told_why(bench: Bench) -> None:
    bench.submit()
    bench.frontend.stop("stopped by the operator")
    bench.turn()
    (delta,) = bench.deltas()
    assert delta.error == ErrorInfo("dead", "request r: stopped by the operator")


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_health_is_that_of_the_last_progress_and_ages(bench: Bench) -> None:
    bench.frontend.on_control_message(Progress(step=5, step_age_s=0.5, num_running=3, num_waiting=4))
    bench.now += 2
    (health,) = bench.say(GetHealth(query_id=1))
    assert isinstance(health, Health) and health.is_ready and not health.is_stalled
    assert (health.step, health.step_age_s, health.num_running, health.num_waiting) == (5, 2.5, 3, 4)
    bench.frontend.on_control_message(Progress(step=5, step_age_s=9.5, num_running=3, num_waiting=4))
    bench.now += 9
    (health,) = bench.say(GetHealth(query_id=2))
    assert isinstance(health, Health) and health.is_stalled
    bench.frontend.on_control_message(Progress(step=6, step_age_s=0.0, num_running=3, num_waiting=4))
    (health,) = bench.say(GetHealth(query_id=3))
    assert isinstance(health, Health) and not health.is_stalled


def test_the_first_step_after_a_long_idle_time_is_no_stall(bench: Bench) -> None:
    bench.frontend.on_control_message(Progress(step=5, step_age_s=0.0, num_running=0, num_waiting=0))
    bench.now += 1000
    bench.frontend.on_control_message(Progress(step=5, step_age_s=1000.0, num_running=1, num_waiting=0))
    bench.now += 1
    (health,) = bench.say(GetHealth(query_id=1))
    assert isinstance(health, Health) and not health.is_stalled


def test_info_tells_what_is_served(bench: Bench) -> None:
    bench.frontend.on_control_message(Initialize(num_blocks=65))
    (info,) = bench.say(GetInfo(query_id=4))
    assert isinstance(info, Info) and (info.query_id, info.model, info.num_kv_blocks) == (4, "sample", 64)
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (512, 1000, [2])


def test_tokenize_and_detokenize_answer_short_and_long(bench: Bench) -> None:
    for text in ("The capital", "The capital " * 1000):
        token_ids = TOKENIZER.encode(text)
        heard = bench.say(Tokenize(query_id=1, prompt=text), Detokenize(query_id=2, token_ids=encode_ids(token_ids)))
        while len(heard) < 2:
            wait_for_wakeup(bench)
            heard += bench.heard()
        by_type = {type(message): message for message in heard}
        assert by_type[TokenIds] == TokenIds(query_id=1, token_ids=encode_ids(token_ids))
        assert by_type[Text] == Text(query_id=2, text=text)


def test_a_query_that_cannot_be_answered_says_why(bench: Bench) -> None:
    failed = bench.say(
        Tokenize(query_id=7),
        Detokenize(query_id=8, token_ids=b"abc"),
        Detokenize(query_id=9, token_ids=encode_ids([-1])),
    )
    assert [(each.query_id, each.error.kind) for each in failed if isinstance(each, QueryFailed)] == [
        (7, "request"),
        (8, "request"),
        (9, "request"),
    ]


# ── speed ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_turn_of_256_streams_costs_little(bench: Bench) -> None:
    """0.6 ms on the machine where this was written, 1 ms with stop strings; the bound leaves room for a busy one."""
    keys = [bench.submit(f"r{i}", params={"max_tokens": 200, "stop": ["\n\n", "User:"]}) for i in range(256)]
    durations = []
    for start, token_id in enumerate(ids("The capital of France is Paris. " * 3)):
        columns = {"keys": keys, "starts": [start] * 256, "counts": [1] * 256, "token_ids": [token_id] * 256}
        outputs = EngineCoreOutputs(**{name: encode_ids(values) for name, values in columns.items()})
        begun = time.perf_counter()
        bench.frontend.on_core_message(outputs)
        bench.frontend.tick(bench.now)
        durations.append(time.perf_counter() - begun)
    assert len(bench.frontend.outbox.to_clients) == len(durations)
    assert min(durations) < 0.005
