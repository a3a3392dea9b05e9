"""A frontend's successor knows which part of another frontend's stream was passed on to a client."""

from __future__ import annotations

from tokenloom.frontend.server.api.continuation import Answer, Continuation
from tokenloom.frontend.server.http.streams.passed_place import PassedPlace
from tokenloom.frontend.server.http.streams.stream import Position
from tokenloom.ipc.codec import decode_ids


def test_a_successor_asks_for_what_follows_the_passed_events() -> None:
    given, continuation = "3,1.0", Continuation(nonce=bytes(16), created=0.0, is_kept=True)
    place = PassedPlace(Position.parse(given), continuation)
    told = Continuation(nonce=bytes(16), created=0.0)  # the journal's, part by part
    for part, after in (
        (b"id: 0-ab/5,1.0\ndata: {}\n\n", "5,1.0"),
        (b": keep-alive\n\n", "5,1.0"),
        (b'data: {"id: 0-ab/9": 1}\n\nid: 0-ab/6e,2.4\ndata: {}\n\n', "6e,2.4"),
        (b"id: 0-ab/end\ndata: [DONE]\n\n", "6e,2.4"),
    ):
        place.move_past(part, continuation)
        shown = continuation.take_shown()
        for choice, token_ids in shown.tokens:
            told.answers.setdefault(choice, Answer([])).token_ids.extend(decode_ids(token_ids))
        for choice, reason in shown.ended:
            told.answers.setdefault(choice, Answer([])).finish_reason = reason
        told.num_events, told.num_cached = shown.num_events, shown.num_cached
        later = PassedPlace(Position.parse(given), told)
        assert place.parameters() == later.parameters() == {"after": after}
        assert later.is_over is place.is_over is (b"DONE" in part)
