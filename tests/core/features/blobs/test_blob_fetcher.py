"""A blob of a gateway is in a store here once it is reported, pinned until it is dropped; a full store delays it."""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tokenloom.core.features.blobs.blob_fetcher import Ask, BlobFetcher
from tokenloom.core.features.blobs.needed_blobs import Failed, Found, Missing, News, Wanted
from tokenloom.ipc.blobs.channel import BlobServer
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import Overloaded, RequestError
from tokenloom.ipc.messages.blobs import GetBlob, NoBlob
from tokenloom.tests.support.shortages import few_descriptors, few_threads

LIMIT = 4 << 20
DEADLINE_S = 20.0


class Bench:
    """A fetcher, and gateways' frontends that reply to it from a store of their own."""

    def __init__(self, folder: Path, **patience_s: float) -> None:
        self.media = BlobStore(folder / "media", LIMIT)
        self.theirs = BlobStore(folder / "theirs", 16 * LIMIT)
        self.server = BlobServer(self.theirs)
        self.fetcher = BlobFetcher(self.media, None, **patience_s)
        self.asked: list[Ask] = []
        self.silent: set[int] = set()  # frontends that do not reply

    def news(self, until: Callable[[list[News]], bool]) -> list[News]:
        """Reply to the fetcher until the news are as wanted."""
        found: list[News] = []
        deadline = time.monotonic() + DEADLINE_S
        while not until(found):
            assert time.monotonic() < deadline, found
            select.select([self.fetcher.fd], [], [], 0.1)
            for each in self.fetcher.take():
                if isinstance(each, Ask):
                    self.asked.append(each)
                    if each.frontend_id not in self.silent:
                        reply = self.server.reply(each.message, 0.0)
                        assert reply is not None
                        self.fetcher.receive(each.frontend_id, reply)
                else:
                    found.append(each)
        return found

    def one(self) -> News:
        (found,) = self.news(lambda found: len(found) == 1)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def is_pinned(store: BlobStore, digest: bytes) -> bool:
    """Whether a blob stays although another process needs the whole store."""
    with suppress(Overloaded):
        BlobStore(store.folder.path, LIMIT).put(random.Random(1).randbytes(LIMIT))
    return (store.folder.path / digest.hex()).exists()


def test_a_blob_comes_in_parts_and_stays_until_it_is_dropped(bench: Bench) -> None:
    content = random.Random(0).randbytes(1_500_000)
    wanted = Wanted(0, bench.theirs.put(content), "image")
    bench.fetcher.want(wanted, 7)
    assert bench.one() == Found(wanted) and bench.media.open(wanted.digest) == content
    assert len(bench.asked) == 12 and {ask.frontend_id for ask in bench.asked} == {7}
    assert is_pinned(bench.media, wanted.digest)
    again = Wanted(1, wanted.digest, "image")
    bench.fetcher.drop(wanted)
    bench.fetcher.want(again, 7)
    assert bench.one() == Found(again) and len(bench.asked) == 12, "it is still here"
    bench.fetcher.drop(again)
    gone = Wanted(2, bytes(32), "image")
    bench.fetcher.want(gone, 7)
    assert bench.one() == Missing(gone, 7) and not is_pinned(bench.media, wanted.digest)


def test_a_blob_comes_from_the_frontend_that_is_named_last(bench: Bench) -> None:
    wanted = Wanted(0, bench.theirs.put(b"content"), "audio")
    bench.silent.add(1)
    bench.fetcher.want(wanted, 1)
    bench.news(lambda _: bool(bench.asked))
    bench.fetcher.want(wanted, 2)
    bench.fetcher.receive(1, NoBlob(digest=wanted.digest))
    assert bench.one() == Found(wanted)


def test_a_full_store_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, retry_s=0.02)
    kept = bench.media.put(random.Random(0).randbytes(LIMIT - 10), "a request")
    wanted = Wanted(0, bench.theirs.put(bytes(100_000)), "image")
    bench.fetcher.want(wanted, 1)
    bench.news(lambda _: len(bench.asked) > 2)
    bench.media.unpin(kept, "a request")
    assert bench.one() == Found(wanted)


def test_a_store_that_stays_full_is_an_overload(tmp_path: Path) -> None:
    bench = Bench(tmp_path, retry_s=0.02, wait_s=0.1)
    bench.media.put(random.Random(2).randbytes(LIMIT - 10), "a request")
    bench.fetcher.want(Wanted(1, bench.theirs.put(bytes(100_000)), "image"), 1)
    found = bench.one()
    assert isinstance(found, Failed) and isinstance(found.error, Overloaded) and "no room for" in str(found.error)


def test_an_engine_without_adapters_refuses_one(bench: Bench) -> None:
    wanted = Wanted(0, bytes(32), "adapter")
    bench.fetcher.want(wanted, 1)
    found = bench.one()
    assert isinstance(found, Failed) and isinstance(found.error, RequestError)


def test_without_a_thread_a_blob_fails_as_an_overload_and_the_next_one_comes(bench: Bench) -> None:
    digest = bench.theirs.put(b"x" * 1000)
    with few_threads():
        bench.fetcher.want(Wanted(1, digest, "image"), 7)
        failed = bench.one()
    assert isinstance(failed, Failed) and isinstance(failed.error, Overloaded) and failed.wanted.number == 1
    bench.fetcher.want(Wanted(2, digest, "image"), 7)
    assert bench.one() == Found(Wanted(2, digest, "image"))


def test_without_descriptors_a_blob_fails_as_an_overload_and_the_next_one_comes(bench: Bench) -> None:
    here, digest = bench.media.put(b"h"), bench.theirs.put(b"x" * 1000)
    bench.fetcher.want(Wanted(1, here, "image"), 7)
    assert isinstance(bench.one(), Found)
    other = bench.media.put(b"o")
    with few_descriptors():
        bench.fetcher.want(Wanted(2, other, "image"), 7)
        failed = bench.one()
        assert isinstance(failed, Failed) and isinstance(failed.error, Overloaded), failed
        assert bench.server.reply(GetBlob(digest=digest, offset=0, length=9), 0.0) is None, "to be asked again"
    bench.fetcher.want(Wanted(3, other, "image"), 7)
    assert isinstance(bench.one(), Found)
    bench.fetcher.want(Wanted(4, digest, "image"), 7)
    assert isinstance(bench.one(), Found)
