"""The Frontend with a core that is down, repeats tokens, forgets or sends malformed columns; resumed answers."""

from __future__ import annotations

from typing import Any

import pytest

from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import Hello, Ping, Unknown
from tokenloom.ipc.messages.client import Accepted, Child, Delta, Deltas
from tokenloom.ipc.messages.core import EngineCoreRequest, Finished
from tokenloom.tests.frontend.bench import WELCOME, Bench, ids, new_submit


@pytest.mark.parametrize("params", [{}, {"stop": ["is P", "Madrid."]}, {"min_tokens": 9, "stop": "is"}])
def test_an_answer_resumed_at_any_token_has_the_same_text(params: dict[str, Any]) -> None:
    """The client's text before the cut plus the text after the resume is the text of an undisturbed run."""
    tokens = [token_id for character in "漢 France is Paris, Spain is Madrid." for token_id in ids(character)]
    calm = Bench()
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
        had = pieces[:cut]
        child = Child(index=0, seed=3, output_token_ids=b"".join(delta.token_ids for delta in had))
        key = bench.submit(params={**params, "max_tokens": 200, "seed": 3}, attempt=1, children=[child])
        assert bench.to_core[-1].children[0].output_token_ids == child.output_token_ids
        bench.tokens((key, max(cut - 2, 0), tokens[max(cut - 2, 0) :]))  # a core may repeat known tokens
        bench.core(finished=[Finished(key=key, reason="length")])
        rest = bench.deltas()
        assert rest[0].start == cut
        assert joined([*had, *rest]) == joined(pieces)
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (pieces[-1].finish_reason, pieces[-1].stop_reason)


def joined(deltas: list[Delta]) -> tuple[bytes, str]:
    return b"".join(delta.token_ids for delta in deltas), "".join(delta.text for delta in deltas)


def test_resumed_tokens_with_a_stop_string_end_without_the_core(bench: Bench) -> None:
    bench.to_core.clear()
    child = Child(seed=1, output_token_ids=encode_ids(ids("Paris")))
    accepted, deltas = bench.say(new_submit(params={"stop": "Par"}, attempt=1, children=[child]))
    assert isinstance(accepted, Accepted) and bench.to_core == []
    assert isinstance(deltas, Deltas) and (deltas.deltas[0].finish_reason, deltas.deltas[0].text) == ("stop", "")


def test_known_tokens_are_dropped_and_a_gap_ends_only_its_request(bench: Bench) -> None:
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


def test_a_core_that_forgot_the_frontend_gets_requests_after_its_welcome(bench: Bench) -> None:
    bench.to_core.clear()
    for _ in range(2):
        bench.frontend.on_core_message(Unknown())
    bench.say(new_submit())
    (hello,) = bench.to_core
    assert bench.frontend.counts["core_lost"] == 1
    assert isinstance(hello, Hello) and hello.fingerprint and not bench.frontend.is_welcome(to_all=False)
    bench.frontend.on_core_message(WELCOME)
    bench.turn()
    assert isinstance(bench.to_core[-1], EngineCoreRequest)


def test_columns_of_unequal_length_are_counted_and_change_nothing(bench: Bench) -> None:
    columns = {"keys": bench.submit(), "starts": 0, "counts": 1, "token_ids": 40}
    good = {name: encode_ids([value]) for name, value in columns.items()}
    for bad in ({"keys": b"\1"}, {"counts": encode_ids([2])}, {"counts": encode_ids([-1])}, {"starts": b""}):
        bench.core(**{**good, **bad})
        assert bench.heard() == []
    assert bench.frontend.counts["malformed_core_frames"] == 4
    bench.core(**good)
    assert len(bench.deltas()) == 1


def test_a_request_refused_by_the_core_ends_with_its_error(bench: Bench) -> None:
    key = bench.core_request().children[0].key
    error = ErrorInfo("overloaded", "65536 requests wait", 2.5)
    bench.core(finished=[Finished(key=key, reason="error", error=error)])
    assert bench.refusal() == error


def test_the_core_is_pinged_only_while_it_has_requests(bench: Bench) -> None:
    bench.now += 10
    bench.turn()
    assert bench.num_core_pings == 0
    bench.submit()
    for _ in range(100):
        bench.now += 0.1
        bench.say(Ping())
    assert 10 <= bench.num_core_pings <= 12
