"""Media of requests: read once, pinned until the release, requested again if the store has lost them."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tokenloom.frontend.server.requests.media.media_desk import MediaDesk
from tokenloom.frontend.server.requests.media.media_input import MediaInput, ReadMedium, ReadPiece
from tokenloom.frontend.server.requests.media.media_job import MediaJob, NeedBytes
from tokenloom.ipc.errors import Overloaded, TokenloomError
from tokenloom.ipc.messages.client import Medium, PutMedium
from tokenloom.ipc.shortages.threads import Threads
from tokenloom.tests.frontend.server.requests.fake_clips import FakePieceReader, clip
from tokenloom.tests.frontend.server.requests.fake_media import BAD, FakePlaceholders, seeing_spec
from tokenloom.tests.support.shortages import few_descriptors, few_threads, num_descriptors
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
Result = list[ReadMedium] | TokenloomError
T = TypeVar("T")


class Desk:
    """A desk with the test as the frontend's loop."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.woken = threading.Event()
        self.reader = FakePieceReader()
        media = MediaInput(self.reader, FakePlaceholders(7))
        self.desk = MediaDesk(seeing_spec(folder, 7, **config), self.woken.set, media)
        self.asked: list[list[bytes]] = []

    def put(self, data: bytes, digest: bytes | None = None) -> Medium:
        digest = digest or hashlib.sha256(data).digest()
        self.desk.put(PutMedium(digest=digest, data=memoryview(data)))
        return Medium(digest=digest)

    def begin(
        self, *media: Medium, scope: str = "", wait_s: float = 60.0, can_repeat: bool = True
    ) -> tuple[MediaJob, list[Result]]:
        results: list[Result] = []
        need: NeedBytes | None = self.asked.append if can_repeat else None
        return self.desk.read([*media], results.append, need=need, scope=scope, wait_s=wait_s), results

    def hold_nothing(self) -> None:
        """Keep no bytes for a request that is about to come, and try a full store again at once."""
        self.desk._puts.hold_s, self.desk._puts.retry_s = 0.0, 0.02

    def first_of(self, found: list[T]) -> T:
        """Return the first item of a list that a turn fills."""
        while not found:
            self.turn()
        return found[0]

    def turn(self) -> None:
        assert self.woken.wait(DEADLINE_S)
        self.woken.clear()
        self.desk.on_wakeup()

    def read(self, *media: Medium, scope: str = "", can_repeat: bool = True) -> tuple[MediaJob, Result]:
        job, results = self.begin(*media, scope=scope, can_repeat=can_repeat)
        return job, self.first_of(results)

    def files(self, *media: Medium, scope: str = "") -> list[bytes]:
        """Read media and return the content of their files."""
        _, result = self.read(*media, scope=scope)
        assert isinstance(result, list), result
        found = [self.desk.store.open(each.digest) for each in result]
        return [bytes(each) for each in found if each is not None]

    def error(self, *media: Medium, scope: str = "") -> str:
        _, result = self.read(*media, scope=scope)
        assert isinstance(result, TokenloomError) and result.__traceback__ is None, "it keeps no frame with bytes"
        return str(result)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.desk.close()
    assert desk.reader.is_closed


def test_media_are_read_in_order_and_each_content_once(desk: Desk) -> None:
    a, b = desk.put(b"a"), desk.put(b"b")
    assert desk.files(b, a, b) == [b"file of b", b"file of a", b"file of b"]
    assert desk.files(a) == [b"file of a"]
    assert desk.files(Medium(digest=a.digest, detail="low")) == [b"file of alow"]
    assert desk.reader.reads == {b"a": 2, b"b": 1}


def test_requests_share_a_reading_and_a_release_ends_only_its_own_request(desk: Desk) -> None:
    desk.reader.held.add(b"a")
    a = desk.put(b"a")
    first, dropped = desk.begin(a)
    _, results = desk.begin(a)
    wait_until(lambda: desk.reader.reads)
    desk.desk.release(first)
    desk.reader.held.clear()
    assert isinstance(desk.first_of(results), list) and not dropped
    assert desk.reader.reads == {b"a": 1}


def test_a_bad_medium_and_a_wrong_digest_fail_alone_and_keep_no_bytes(desk: Desk) -> None:
    bad, wrong, good = desk.put(BAD), desk.put(b"a", bytes(32)), desk.put(b"g")
    assert desk.error(good, bad) == "the image 2 of 2 cannot be taken: this is no image"
    assert desk.error(wrong).startswith("the digest of a medium is")
    assert desk.error(Medium(kind="audio", digest=bad.digest)).startswith("the audio clip 1 of 1 cannot be taken")
    assert desk.files(good) == [b"file of g"]


def test_missing_bytes_are_requested_once_and_come_late_or_never(desk: Desk) -> None:
    a = Medium(digest=hashlib.sha256(b"a").digest())
    _, results = desk.begin(a, a)
    desk.first_of(desk.asked)
    desk.put(b"a")
    assert isinstance(desk.first_of(results), list) and len(results[0]) == 2
    assert desk.asked == [[a.digest]]
    _, lost = desk.read(Medium(digest=bytes(32)), can_repeat=False)
    assert isinstance(lost, Overloaded) and "send them again" in str(lost)
    _, results = desk.begin(Medium(digest=bytes(32)), wait_s=0.05)
    assert isinstance(desk.first_of(results), Overloaded) and "were not read within 0.05 s" in str(results[0])


def test_media_are_pinned_until_the_last_release_and_a_full_store_makes_others_wait(tmp_path: Path) -> None:
    desk = Desk(tmp_path, media_store_bytes=2500)
    desk.hold_nothing()
    a = desk.put(b"a" * 1000)
    (job, first), (again, _) = desk.read(a), desk.read(a)
    assert isinstance(first, list)
    waiting, others = desk.begin(desk.put(b"b" * 1000))
    with pytest.raises(AssertionError):  # there is room for the bytes of the second, not for its file
        assert desk.woken.wait(0.3)
    assert desk.desk.store.open(first[0].digest) is not None
    for each in (job, again):
        desk.desk.release(each)
    assert isinstance(desk.first_of(others), list)
    assert desk.desk.store.open(first[0].digest) is None, "an image that nobody needs is evicted"
    desk.desk.release(waiting)
    desk.read(desk.put(BAD))
    desk.desk.close()
    assert not desk.desk.store._pins


def test_data_urls_are_decoded_and_others_refused_by_the_option(desk: Desk) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"a").decode()
    assert desk.files(Medium(url=url)) == [b"file of a"]
    assert "--allowed-media-domains" in desk.error(Medium(url="https://a.example/b.png"))
    assert "--allowed-local-media-path" in desk.error(Medium(url="file:///etc/passwd"))


def test_a_uuid_stands_for_bytes_of_its_scope(desk: Desk) -> None:
    desk.put(b"a")
    desk.files(Medium(digest=hashlib.sha256(b"a").digest(), uuid="one"), scope="tenant")
    assert desk.files(Medium(uuid="one"), scope="tenant") == [b"file of a"]
    assert "no medium with uuid 'one'" in desk.error(Medium(uuid="one"), scope="other")


def test_too_many_bytes_are_refused_before_they_are_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_media_bytes=10)
    assert "has 11 bytes, at most 10 are read" in desk.error(desk.put(b"a" * 11))
    assert desk.desk.store.num_bytes() == 0
    desk.desk.close()


def cut(desk: Desk, texts: Sequence[str] = "abc") -> tuple[MediaJob, list[Medium]]:
    results: list[Sequence[ReadPiece] | TokenloomError] = []
    job = desk.desk.read_pieces(desk.put(clip(*texts)), 30.0, results.append)
    pieces = desk.first_of(results)
    assert not isinstance(pieces, TokenloomError), pieces
    return job, [Medium(kind="audio", digest=each.digest) for each in pieces]


def num_pins(desk: Desk) -> int:
    desk.read()  # behind all releases
    pins = desk.desk.store._pins
    return sum(user.startswith("job") for pin in [*pins.values()] for user in [*pin.users])


def test_a_clip_is_cut_once_and_its_pieces_are_pinned_for_jobs_and_requests_that_name_them(desk: Desk) -> None:
    first, pieces = cut(desk, ["one", "two", "three"])
    assert [desk.desk.store.open(each.digest) for each in pieces] == [b"one", b"two", b"three"]
    second, again = cut(desk, ["one", "two", "three"])
    assert again == pieces and num_pins(desk) == 6
    request, read = desk.read(pieces[1], can_repeat=False)
    assert isinstance(read, list) and [each.digest for each in read] == [pieces[1].digest]
    assert list(desk.reader.reads.values()) == [1] and desk.reader.piece_s == 30.0
    for job, num_left in ((first, 4), (second, 1), (request, 0)):
        desk.desk.release(job)
        assert num_pins(desk) == num_left


def test_pieces_that_are_pinned_stay_known_among_many_other_media(desk: Desk) -> None:
    desk.desk._max_known = 5
    _, pieces = cut(desk)
    for number in range(8):
        job, _ = desk.read(desk.put(b"%d" % number))
        desk.desk.release(job)
    assert len(desk.files(*pieces)) == 3
    assert len(desk.desk._known) <= 5 + len(pieces)


def test_a_clip_of_more_pieces_than_may_be_open_is_refused_and_requests_for_pieces_need_no_more(desk: Desk) -> None:
    desk.desk._max_pinned = 3
    results: list[object] = []
    desk.desk.read_pieces(desk.put(clip(*"abcd")), 1.0, results.append)
    assert "the clip has 4 pieces of 1 s, of which 3 can be open" in str(desk.first_of(results))
    results.clear()
    desk.desk.read_pieces(Medium(kind="audio", url="https://a.example/b.wav"), 3.0, results.append)
    assert str(desk.first_of(results)).startswith("the audio clip 1 of 1 cannot be taken: https://a.example/b.wav")
    _, pieces = cut(desk)
    assert len(desk.files(*pieces)) == 3


def test_without_a_thread_media_are_refused_and_the_next_request_reads_them(desk: Desk) -> None:
    digest = hashlib.sha256(b"a").digest()
    kept = desk.desk.store.put(b"kept")
    with few_threads():
        a = desk.put(b"a")
        job, result = desk.read(a)
        assert isinstance(result, Overloaded) and "can't start new thread" in str(result)
        desk.desk.release(job)
        released, dropped = desk.begin(a)
        desk.desk.release(released)
        desk.turn()
        assert not dropped
        with pytest.raises(Overloaded):
            desk.desk.hold([kept])
    assert not desk.desk.store._pins
    _, results = desk.begin(Medium(digest=digest))
    desk.first_of(desk.asked)
    desk.put(b"a")  # the bytes of the first try were dropped, and are asked for
    assert isinstance(desk.first_of(results), list)


def test_bytes_that_no_thread_can_write_are_refused_and_leave_no_pin(desk: Desk) -> None:
    assert desk.files(desk.put(b"a")) == [b"file of a"]
    data = "data:image/png;base64," + base64.b64encode(b"b").decode()
    executor = desk.desk._loop._default_executor  # type: ignore[union-attr]
    assert isinstance(executor, Threads)
    is_over = threading.Event()
    busy = [executor.submit(is_over.wait, DEADLINE_S) for _ in range(executor._max_workers)]
    wait_until(lambda: all(each.running() for each in busy))
    executor._max_workers += 1  # the next work needs another thread
    with few_threads():
        job, results = desk.begin(Medium(url=data), wait_s=0.2)
        assert isinstance(desk.first_of(results), Overloaded)
        desk.desk.release(job)
    is_over.set()
    assert desk.files(Medium(url=data)) == [b"file of b"]
    users = {user for pin in desk.desk.store._pins.values() for user in pin.users}
    assert job.user not in users and job.source_user not in users


@pytest.mark.parametrize("num_left", range(4))
def test_without_descriptors_media_are_refused_and_none_is_kept(tmp_path: Path, num_left: int) -> None:
    desk, before = Desk(tmp_path), num_descriptors()
    with few_descriptors(num_left):
        a = desk.put(b"a")
        job, results = desk.begin(a, wait_s=0.5, can_repeat=False)
        assert isinstance(desk.first_of(results), Overloaded), results
    desk.desk.release(job)
    assert desk.files(desk.put(b"a")) == [b"file of a"]
    desk.desk.close()
    for digest, pin in list(desk.desk.store._pins.items()):
        for user in list(pin.users):
            desk.desk.store.unpin(digest, user)
    assert num_descriptors() <= before  # those of earlier tests may be closed late
