"""A frontend notes the request that it works on, at every step of it, and refuses those that have ended two."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.server.prompts.prompt_reader import SHORT_CHARACTERS
from tokenloom.ipc.messages.base import Ping, Pong
from tokenloom.ipc.messages.client import ClientMessage, ListAdapters, QueryFailed, TokenIds, Tokenize
from tokenloom.ipc.notes.deadly import LOSSES_TO_REFUSE, NONE, DeadlyRequests, ReadingNote
from tokenloom.tests.frontend.bench import TOKENIZER, Bench, new_submit


class Spy:
    """The tokenizer, which records the keys in the note, of the loop or of threads, at each use of it there."""

    def __init__(self, note: ReadingNote) -> None:
        self._note, self.seen = note, defaultdict[bool, set[bytes]](set)

    def __getattr__(self, name: str) -> Any:
        in_loop = threading.current_thread() is threading.main_thread()
        self.seen[in_loop] |= keys_in(bytes(self._note.cells[:16] if in_loop else self._note.cells[16:]))
        return getattr(TOKENIZER, name)


def keys_in(note: bytes) -> set[bytes]:
    return {note[start : start + 16] for start in range(0, len(note), 16)} - {NONE}


def new_bench(folder: Path, number: int) -> Bench:
    return Bench(note=ReadingNote(str(folder), f"frontend-{number}"))


SHORT, LONG = "a", "a " * SHORT_CHARACTERS
MESSAGES = [new_submit("r"), Tokenize(query_id=3, prompt="a"), ListAdapters(query_id=4)]


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["in the loop", "in a thread"])
def test_a_prompt_is_tokenized_under_the_key_of_its_request(prompt: str) -> None:
    note = ReadingNote()
    spy = Spy(note)
    bench = Bench(tokenizer=spy, note=note)  # type: ignore[arg-type]
    spy.seen.clear()
    bench.say(new_submit("r", prompt=prompt))
    if prompt == LONG:
        bench.wait_for_wakeup()
    assert spy.seen[prompt == SHORT] == {note.key_of(b"c", repr("r").encode())}
    assert note.cells == bytes(len(note.cells)) and note.current == NONE


def test_an_answer_becomes_text_under_the_key_of_its_request() -> None:
    bench = Bench()
    note, key = bench.frontend.note, bench.submit("r")
    other = bench.submit("other")
    answer = bench.frontend._outputs.answer_by_key[key]

    class Deadly:
        request = answer.request

        def append(self, *_: object) -> bool:
            raise KeyboardInterrupt

    bench.frontend._outputs.answer_by_key[key] = Deadly()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        bench.tokens((other, 0, [5]), (key, 0, [5]))
    assert note.cells[:16] == note.key_of(b"c", repr("r").encode())
    del bench.frontend._outputs.answer_by_key[key]
    bench.tokens((other, 1, [5]))
    assert note.cells[:16] == NONE


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_ended_two_frontends_is_refused_under_its_id_from_its_client_alone(
    message: ClientMessage, tmp_path: Path
) -> None:
    table = DeadlyRequests(tmp_path)
    for number in range(LOSSES_TO_REFUSE):
        bench = new_bench(tmp_path, number)
        identity = repr(getattr(message, "request_id", None) or getattr(message, "query_id", None))
        bench.frontend.note.begin(bench.frontend.note.key_of(b"c", identity.encode()))  # and the frontend ends
        table.on_loss(f"frontend-{number}", is_to_blame=True)
    bench = new_bench(tmp_path, LOSSES_TO_REFUSE)
    if isinstance(message, Tokenize | ListAdapters):
        (failed,) = bench.say(message)
        assert isinstance(failed, QueryFailed) and failed.query_id == message.query_id
        error = failed.error
    else:
        error = bench.refusal(message)
    assert error.kind == "request" and error.message.startswith("2 frontends have ended while they worked on this")
    assert bench.frontend.counts["deadly_requests"] == 1
    assert bench.to_core == []
    assert bench.say(Ping()) == [Pong()]  # the client goes on
    (ids,) = bench.say(Tokenize(query_id=99, prompt="a"))
    assert isinstance(ids, TokenIds)
    bench.submit("another")
    bench.hello(b"other")
    bench.submit("r", client=b"other")


def test_a_bug_that_one_request_meets_ends_this_request_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    other, process = bench.submit("other"), bench.frontend.inputs.process

    def fail_later(*arguments: Any) -> Any:
        processed = process(*arguments)
        return msgspec.structs.replace(processed, children=[*processed.children, None])

    bench.frontend.inputs.process = fail_later  # type: ignore[method-assign]
    error = bench.refusal(new_submit("r"))
    assert error.kind == "internal" and "'NoneType' object has no attribute" in error.message
    assert [record.message for record in caplog.records] == ["work on a request failed"]
    assert list(bench.frontend._outputs.answer_by_key) == [other]
    bench.frontend.inputs.process = process  # type: ignore[method-assign]
    assert bench.submit("r") != other


@pytest.mark.parametrize("is_open", [False, True])
def test_a_bug_in_handling_a_message_ends_its_request_or_query_alone(is_open: bool, bench: Bench) -> None:
    other = bench.submit("other")

    def fail(*_: object, **__: object) -> None:
        raise KeyError("bug")

    if is_open:
        bench.frontend.prompts.read = fail  # type: ignore[assignment]
    else:
        bench.frontend._requests._expires_at = fail  # type: ignore[assignment]
    assert "KeyError: 'bug'" in bench.refusal(new_submit("r")).message
    if is_open:
        (failed,) = bench.say(Tokenize(query_id=7, prompt="a"))
        assert isinstance(failed, QueryFailed) and failed.query_id == 7 and "KeyError" in failed.error.message
    assert list(bench.frontend._outputs.answer_by_key) == [other]
