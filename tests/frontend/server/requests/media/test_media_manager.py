"""Media of requests: read once, pinned until the release, requested again if the store has lost them."""

from __future__ import annotations

import base64
import hashlib
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tokenloom.frontend.server.requests.media.media_input import MediaInput, ReadMedium, ReadPiece
from tokenloom.frontend.server.requests.media.media_job import MediaJob, NeedBytes
from tokenloom.frontend.server.requests.media.media_manager import MediaManager
from tokenloom.ipc.errors import Overloaded, TokenloomError
from tokenloom.ipc.messages.client import Medium, PutMedium
from tokenloom.ipc.shortages.threads import Threads
from tokenloom.tests.frontend.server.requests.fake_clips import FakePieceReader, clip
from tokenloom.tests.frontend.server.requests.fake_media import BAD, FakePlaceholders, seeing_spec
from tokenloom.tests.support.outcomes import outcomes_of
from tokenloom.tests.support.shortages import few_descriptors, few_threads, num_descriptors
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
Job = MediaJob[list[ReadMedium]]
Result = list[ReadMedium] | TokenloomError
T = TypeVar("T")


class Bench:
    """A manager with the test as the frontend's loop."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.woken = threading.Event()
        self.reader = FakePieceReader()
        media = MediaInput(self.reader, FakePlaceholders(7))
        self.manager = MediaManager(seeing_spec(folder, 7, **config), self.woken.set, media)
        self.asked: list[list[bytes]] = []

    def put(self, data: bytes, digest: bytes | None = None) -> Medium:
        digest = digest or hashlib.sha256(data).digest()
        self.manager.put(PutMedium(digest=digest, data=memoryview(data)))
        return Medium(digest=digest)

    def begin(
        self, *media: Medium, scope: str = "", wait_s: float = 60.0, can_repeat: bool = True
    ) -> tuple[Job, list[Result]]:
        need: NeedBytes | None = self.asked.append if can_repeat else None
        job = self.manager.read([*media], need=need, scope=scope, wait_s=wait_s)
        return job, outcomes_of(job.reply)

    def hold_nothing(self) -> None:
        """Keep no bytes for a request that is about to come, and try a full store again at once."""
        self.manager._puts.hold_s, self.manager._puts.retry_s = 0.0, 0.02

    def first_of(self, found: list[T]) -> T:
        """Return the first item of a list that a turn fills."""
        while not found:
            self.turn()
        return found[0]

    def turn(self) -> None:
        assert self.woken.wait(DEADLINE_S)
        self.woken.clear()
        self.manager.on_wakeup()

    def read(self, *media: Medium, scope: str = "", can_repeat: bool = True) -> tuple[Job, Result]:
        job, results = self.begin(*media, scope=scope, can_repeat=can_repeat)
        return job, self.first_of(results)

    def files(self, *media: Medium, scope: str = "") -> list[bytes]:
        """Read media and return the content of their files."""
        _, result = self.read(*media, scope=scope)
        assert isinstance(result, list), result
        found = [self.manager.store.open(each.digest) for each in result]
        return [bytes(each) for each in found if each is not None]

    def error(self, *media: Medium, scope: str = "") -> str:
        _, result = self.read(*media, scope=scope)
        assert isinstance(result, TokenloomError)
        frames = [frame.name for frame in traceback.extract_tb(result.__traceback__)]
        assert frames == ["keep", "__await__"], "it keeps no frame with bytes"
        return str(result)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.manager.close()
    assert bench.reader.is_closed


def test_media_are_read_in_order_and_each_content_once(bench: Bench) -> None:
    a, b = bench.put(b"a"), bench.put(b"b")
    assert bench.files(b, a, b) == [b"file of b", b"file of a", b"file of b"]
    assert bench.files(a) == [b"file of a"]
    assert bench.files(Medium(digest=a.digest, detail="low")) == [b"file of alow"]
    assert bench.reader.reads == {b"a": 2, b"b": 1}


def test_requests_share_a_reading_and_a_release_ends_only_its_own_request(bench: Bench) -> None:
    bench.reader.held.add(b"a")
    a = bench.put(b"a")
    first, dropped = bench.begin(a)
    _, results = bench.begin(a)
    wait_until(lambda: bench.reader.reads)
    bench.manager.release(first)
    bench.reader.held.clear()
    assert isinstance(bench.first_of(results), list) and not dropped
    assert bench.reader.reads == {b"a": 1}


def test_a_bad_medium_and_a_wrong_digest_fail_alone_and_keep_no_bytes(bench: Bench) -> None:
    bad, wrong, good = bench.put(BAD), bench.put(b"a", bytes(32)), bench.put(b"g")
    assert bench.error(good, bad) == "the image 2 of 2 cannot be taken: this is no image"
    assert bench.error(wrong).startswith("the digest of a medium is")
    assert bench.error(Medium(kind="audio", digest=bad.digest)).startswith("the audio clip 1 of 1 cannot be taken")
    assert bench.files(good) == [b"file of g"]


def test_missing_bytes_are_requested_once_and_come_late_or_never(bench: Bench) -> None:
    a = Medium(digest=hashlib.sha256(b"a").digest())
    _, results = bench.begin(a, a)
    bench.first_of(bench.asked)
    bench.put(b"a")
    assert isinstance(bench.first_of(results), list) and len(results[0]) == 2
    assert bench.asked == [[a.digest]]
    _, lost = bench.read(Medium(digest=bytes(32)), can_repeat=False)
    assert isinstance(lost, Overloaded) and "send them again" in str(lost)
    _, results = bench.begin(Medium(digest=bytes(32)), wait_s=0.05)
    assert isinstance(bench.first_of(results), Overloaded) and "were not read within 0.05 s" in str(results[0])


def test_media_are_pinned_until_the_last_release_and_a_full_store_makes_others_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path, media_store_bytes=2500)
    bench.hold_nothing()
    a = bench.put(b"a" * 1000)
    (job, first), (again, _) = bench.read(a), bench.read(a)
    assert isinstance(first, list)
    waiting, others = bench.begin(bench.put(b"b" * 1000))
    with pytest.raises(AssertionError):  # there is room for the bytes of the second, not for its file
        assert bench.woken.wait(0.3)
    assert bench.manager.store.open(first[0].digest) is not None
    for each in (job, again):
        bench.manager.release(each)
    assert isinstance(bench.first_of(others), list)
    assert bench.manager.store.open(first[0].digest) is None, "an image that nobody needs is evicted"
    bench.manager.release(waiting)
    bench.read(bench.put(BAD))
    bench.manager.close()
    assert not bench.manager.store._pins


def test_data_urls_are_decoded_and_others_refused_by_the_option(bench: Bench) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"a").decode()
    assert bench.files(Medium(url=url)) == [b"file of a"]
    assert "--allowed-media-domains" in bench.error(Medium(url="https://a.example/b.png"))
    assert "--allowed-local-media-path" in bench.error(Medium(url="file:///etc/passwd"))


def test_a_uuid_stands_for_bytes_of_its_scope(bench: Bench) -> None:
    bench.put(b"a")
    bench.files(Medium(digest=hashlib.sha256(b"a").digest(), uuid="one"), scope="tenant")
    assert bench.files(Medium(uuid="one"), scope="tenant") == [b"file of a"]
    assert "no medium with uuid 'one'" in bench.error(Medium(uuid="one"), scope="other")


def test_too_many_bytes_are_refused_before_they_are_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_media_bytes=10)
    assert "has 11 bytes, at most 10 are read" in bench.error(bench.put(b"a" * 11))
    assert bench.manager.store.num_bytes() == 0
    bench.manager.close()


def cut(bench: Bench, texts: Sequence[str] = "abc") -> tuple[MediaJob[Sequence[ReadPiece]], list[Medium]]:
    job = bench.manager.read_pieces(bench.put(clip(*texts)), 30.0)
    pieces = bench.first_of(outcomes_of(job.reply))
    assert not isinstance(pieces, TokenloomError), pieces
    return job, [Medium(kind="audio", digest=each.digest) for each in pieces]


def num_pins(bench: Bench) -> int:
    bench.read()  # behind all releases
    pins = bench.manager.store._pins
    return sum(user.startswith("job") for pin in [*pins.values()] for user in [*pin.users])


def test_a_clip_is_cut_once_and_its_pieces_are_pinned_for_jobs_and_requests_that_name_them(bench: Bench) -> None:
    first, pieces = cut(bench, ["one", "two", "three"])
    assert [bench.manager.store.open(each.digest) for each in pieces] == [b"one", b"two", b"three"]
    second, again = cut(bench, ["one", "two", "three"])
    assert again == pieces and num_pins(bench) == 6
    request, read = bench.read(pieces[1], can_repeat=False)
    assert isinstance(read, list) and [each.digest for each in read] == [pieces[1].digest]
    assert list(bench.reader.reads.values()) == [1] and bench.reader.piece_s == 30.0
    for job, num_left in ((first, 4), (second, 1), (request, 0)):
        bench.manager.release(job)
        assert num_pins(bench) == num_left


def test_pieces_that_are_pinned_stay_known_among_many_other_media(bench: Bench) -> None:
    bench.manager._max_known = 5
    _, pieces = cut(bench)
    for number in range(8):
        job, _ = bench.read(bench.put(b"%d" % number))
        bench.manager.release(job)
    assert len(bench.files(*pieces)) == 3
    assert len(bench.manager._known) <= 5 + len(pieces)


def test_a_clip_of_more_pieces_than_may_be_open_is_refused_and_requests_for_pieces_need_no_more(bench: Bench) -> None:
    bench.manager._max_pinned = 3
    results = outcomes_of(bench.manager.read_pieces(bench.put(clip(*"abcd")), 1.0).reply)
    assert "the clip has 4 pieces of 1 s, of which 3 can be open" in str(bench.first_of(results))
    results = outcomes_of(bench.manager.read_pieces(Medium(kind="audio", url="https://a.example/b.wav"), 3.0).reply)
    assert str(bench.first_of(results)).startswith("the audio clip 1 of 1 cannot be taken: https://a.example/b.wav")
    _, pieces = cut(bench)
    assert len(bench.files(*pieces)) == 3


def test_without_a_thread_media_are_refused_and_the_next_request_reads_them(bench: Bench) -> None:
    digest = hashlib.sha256(b"a").digest()
    kept = bench.manager.store.put(b"kept")
    with few_threads():
        a = bench.put(b"a")
        job, result = bench.read(a)
        assert isinstance(result, Overloaded) and "can't start new thread" in str(result)
        bench.manager.release(job)
        released, dropped = bench.begin(a)
        bench.manager.release(released)
        bench.turn()
        assert not dropped
        with pytest.raises(Overloaded):
            bench.manager.hold([kept])
    assert not bench.manager.store._pins
    _, results = bench.begin(Medium(digest=digest))
    bench.first_of(bench.asked)
    bench.put(b"a")  # the bytes of the first try were dropped, and are asked for
    assert isinstance(bench.first_of(results), list)


def test_bytes_that_no_thread_can_write_are_refused_and_leave_no_pin(bench: Bench) -> None:
    assert bench.files(bench.put(b"a")) == [b"file of a"]
    data = "data:image/png;base64," + base64.b64encode(b"b").decode()
    executor = bench.manager._loop._default_executor  # type: ignore[union-attr]
    assert isinstance(executor, Threads)
    is_over = threading.Event()
    busy = [executor.submit(is_over.wait, DEADLINE_S) for _ in range(executor._max_workers)]
    wait_until(lambda: all(each.running() for each in busy))
    executor._max_workers += 1  # the next work needs another thread
    with few_threads():
        job, results = bench.begin(Medium(url=data), wait_s=0.2)
        assert isinstance(bench.first_of(results), Overloaded)
        bench.manager.release(job)
    is_over.set()
    assert bench.files(Medium(url=data)) == [b"file of b"]
    users = {user for pin in bench.manager.store._pins.values() for user in pin.users}
    assert job.user not in users and job.source_user not in users


@pytest.mark.parametrize("num_left", range(4))
def test_without_descriptors_media_are_refused_and_none_is_kept(tmp_path: Path, num_left: int) -> None:
    bench, before = Bench(tmp_path), num_descriptors()
    with few_descriptors(num_left):
        a = bench.put(b"a")
        job, results = bench.begin(a, wait_s=0.5, can_repeat=False)
        assert isinstance(bench.first_of(results), Overloaded), results
    bench.manager.release(job)
    assert bench.files(bench.put(b"a")) == [b"file of a"]
    bench.manager.close()
    for digest, pin in list(bench.manager.store._pins.items()):
        for user in list(pin.users):
            bench.manager.store.unpin(digest, user)
    assert num_descriptors() <= before  # those of earlier tests may be closed late
