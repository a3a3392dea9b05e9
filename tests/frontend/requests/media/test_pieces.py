"""A clip is cut once; its pieces stay in the store as long as a job needs them, and requests name them by digest."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tokenloom.frontend.requests.media.media_desk import MediaDesk
from tokenloom.frontend.requests.media.media_input import MediaInput, ReadMedium
from tokenloom.frontend.requests.media.media_job import MediaJob
from tokenloom.ipc.errors import RequestError, TokenloomError
from tokenloom.ipc.messages.client import Medium, PutMedium
from tokenloom.tests.frontend.requests.fake_clips import FakePieceReader, clip
from tokenloom.tests.frontend.requests.fake_media import FakePlaceholders, seeing_spec

DEADLINE_S = 20.0


class Desk:
    """A desk with the test as the frontend's loop."""

    def __init__(self, folder: Path) -> None:
        self.woken = threading.Event()
        self.reader = FakePieceReader()
        media = MediaInput(self.reader, FakePlaceholders(7))
        self.desk = MediaDesk(seeing_spec(folder, 7), self.woken.set, media)

    def put(self, data: bytes) -> Medium:
        digest = self.desk.store.put(data)
        self.desk.put(PutMedium(digest=digest, data=memoryview(data)))
        return Medium(kind="audio", digest=digest)

    def read(self, *media: Medium, piece_s: float = 0.0) -> tuple[MediaJob, Sequence[ReadMedium] | TokenloomError]:
        results: list[list[ReadMedium] | TokenloomError] = []
        if piece_s:
            job = self.desk.read_pieces(media[0], piece_s, results.append, wait_s=5.0)  # type: ignore[arg-type]
        else:
            job = self.desk.read([*media], results.append, wait_s=5.0)
        while not results:
            assert self.woken.wait(DEADLINE_S)
            self.woken.clear()
            self.desk.on_wakeup()
        return job, results[0]

    def cut(self, *texts: str) -> tuple[MediaJob, list[Medium]]:
        job, pieces = self.read(self.put(clip(*texts)), piece_s=30.0)
        assert isinstance(pieces, Sequence), pieces
        return job, [Medium(kind="audio", digest=piece.digest) for piece in pieces]

    def text(self, medium: Medium) -> str:
        content = self.desk.store.open(medium.digest)
        return "" if content is None else bytes(content).decode()

    @property
    def num_pins(self) -> int:
        self.read()  # behind all releases
        pins = self.desk.store._pins
        return sum(user.startswith("job") for pin in [*pins.values()] for user in [*pin.users])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.desk.close()


def test_pieces_come_in_order_and_a_clip_is_cut_once(desk: Desk) -> None:
    first, pieces = desk.cut("one", "two", "three")
    assert [desk.text(piece) for piece in pieces] == ["one", "two", "three"] and desk.reader.piece_s == 30.0
    second, again = desk.cut("one", "two", "three")
    assert again == pieces and list(desk.reader.reads.values()) == [1]
    assert desk.num_pins == 6
    desk.desk.release(first)
    assert desk.num_pins == 3
    desk.desk.release(second)
    assert desk.num_pins == 0


def test_a_request_names_a_piece_by_its_digest_and_nothing_is_read_again(desk: Desk) -> None:
    job, pieces = desk.cut("one", "two")
    request, read = desk.read(pieces[1])
    assert isinstance(read, Sequence) and [each.digest for each in read] == [pieces[1].digest]
    assert sum(desk.reader.reads.values()) == 1
    desk.desk.release(job)
    assert desk.num_pins == 1
    desk.desk.release(request)
    assert desk.num_pins == 0


def test_pieces_that_are_pinned_stay_known_among_many_other_media(desk: Desk) -> None:
    desk.desk._max_known = 5
    _, pieces = desk.cut("one", "two", "three")
    for number in range(8):
        job, _ = desk.read(desk.put(b"%d" % number))
        desk.desk.release(job)
    for piece in pieces:
        _, read = desk.read(piece)
        assert isinstance(read, Sequence) and read[0].digest == piece.digest
    assert len(desk.desk._known) <= 5 + len(pieces)


def test_requests_for_pieces_do_not_wait_for_the_pins_of_their_own_clip(desk: Desk) -> None:
    desk.desk._max_pinned = 3
    _, pieces = desk.cut("one", "two", "three")
    _, read = desk.read(*pieces)
    assert isinstance(read, Sequence) and len(read) == 3


def test_a_clip_of_more_pieces_than_may_be_open_is_refused(desk: Desk) -> None:
    desk.desk._max_pinned = 2
    _, error = desk.read(desk.put(clip("one", "two", "three")), piece_s=30.0)
    assert isinstance(error, RequestError) and "the clip has 3 pieces of 30 s, of which 2 can be open" in str(error)
    assert desk.num_pins == 0
