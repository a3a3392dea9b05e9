"""A download that is broken off, refused, or finds the disk full."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.downloads.cached import CachedRepository
from tokenloom.frontend.checkpoint.downloads.download import NUM_TRIES, Download
from tokenloom.frontend.checkpoint.downloads.repository import HubFile
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

DEADLINE_S = 30.0
CONTENT = random.Random(1).randbytes(100_000)
FILE = HubFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class Lost(Exception):
    """The error of an HTTP library whose connection is lost."""


class Server:
    """Answers with CONTENT from the asked byte on. `plan`: for each request the bytes before the connection is lost."""

    def __init__(self, plan: list[int], *, content: bytes = CONTENT, has_ranges: bool = True) -> None:
        self.plan, self.content, self.has_ranges = plan, content, has_ranges
        self.begins: list[int] = []
        self.status_code, self.headers = 200, dict[str, str]()
        self._begin = 0

    @contextmanager
    def open_at(self, file: HubFile, begin: int) -> Iterator[Server]:
        self.begins.append(begin)
        self._begin = begin if self.has_ranges else 0
        self.status_code = 206 if self._begin else 200
        yield self

    def iter_raw(self) -> Iterator[bytes]:
        rest = self.content[self._begin :]
        length = self.plan.pop(0) if self.plan else len(rest)
        for at in range(0, min(length, len(rest)), 1000):
            yield rest[at : min(at + 1000, length)]
        if length < len(rest):
            raise Lost("the connection is lost")


class Bar:
    n = 0.0

    def update(self, n: float) -> None:
        self.n += n


@pytest.fixture
def place(tmp_path: Path) -> CachedRepository:
    return CachedRepository("owner/name", EngineConfig(download_dir=str(tmp_path)))


@pytest.fixture
def run(place: CachedRepository) -> Callable[[Server], Bar]:
    def run(server: Server, file: HubFile = FILE) -> Bar:
        bar = Bar()
        Download(place, server.open_at, bar, lambda line: None, lambda seconds: None).run([file])
        return bar

    return run


Run = Callable[..., Bar]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_lost_connection_is_opened_again_and_the_rest_alone_is_asked_for(
    has_ranges: bool, place: CachedRepository, run: Run
) -> None:
    server = Server([30_000, 0, 20_000], has_ranges=has_ranges)
    bar = run(server)
    assert server.begins == ([0, 30_000, 30_000, 50_000] if has_ranges else [0, 30_000, 0, 20_000])
    assert place.blob(FILE.etag).read_bytes() == CONTENT and bar.n == len(CONTENT)
    assert not place.partial(FILE.etag).exists()


def test_the_next_download_goes_on_where_one_was_given_up(place: CachedRepository, run: Run) -> None:
    server = Server([40_000, *[0] * NUM_TRIES])
    with pytest.raises(Lost):
        run(server)
    assert server.begins == [0, *[40_000] * NUM_TRIES]
    assert place.partial(FILE.etag).stat().st_size == 40_000 and not place.blob(FILE.etag).exists()
    server = Server([])
    assert run(server).n == len(CONTENT)
    assert server.begins == [40_000] and place.blob(FILE.etag).read_bytes() == CONTENT


def test_parts_that_are_not_the_file_are_dropped(place: CachedRepository, run: Run) -> None:
    place.partial(FILE.etag).parent.mkdir(parents=True)
    place.partial(FILE.etag).write_bytes(b"x" * 10)
    with pytest.raises(ConfigError, match="its parts are not the file that the hub lists, and were dropped: try again"):
        run(Server([]))
    assert run(Server([])).n == len(CONTENT)
    assert place.blob(FILE.etag).read_bytes() == CONTENT


@pytest.mark.parametrize("length", [0, 50_000, 200_000])
def test_a_file_of_another_length_than_listed_is_no_file(length: int, place: CachedRepository, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"sends nothing|sent 200000 bytes, it lists 100000"):
        run(Server([], content=(CONTENT + CONTENT)[:length]))
    assert not place.blob(FILE.etag).exists()


def test_a_refusal_is_not_tried_again(run: Run) -> None:
    class Refused(Exception):
        class response:  # noqa: N801
            status_code = 403

    class Refusing(Server):
        def iter_raw(self) -> Iterator[bytes]:
            raise Refused

    server = Refusing([])
    with pytest.raises(Refused):
        run(server)
    assert server.begins == [0]


def test_a_download_that_is_stopped_keeps_the_part_and_makes_no_file_of_it(place: CachedRepository) -> None:
    refused, held = FILE._replace(name="a", etag="a"), FILE._replace(name="b", etag="b")
    is_there, released = threading.Event(), threading.Event()

    class Both(Server):
        @contextmanager
        def open_at(self, file: HubFile, begin: int) -> Iterator[Server]:
            if file == refused:
                assert is_there.wait(DEADLINE_S)
                raise OSError(errno.EIO, "no")
            yield self

        def iter_raw(self) -> Iterator[bytes]:
            yield CONTENT[:1000]
            is_there.set()
            assert released.wait(DEADLINE_S)
            yield CONTENT[1000:2000]
            yield CONTENT[2000:]

    before = {*threading.enumerate()}
    with pytest.raises(OSError, match="no"):
        Download(place, Both([]).open_at, Bar(), lambda line: None, stop_timeout_s=0.0).run([refused, held])
    threads = {*threading.enumerate()} - before
    released.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert place.partial("b").stat().st_size == 2000 and not place.blob("b").exists()
    assert not place.partial("a").exists(), "nothing came"


def test_a_full_disk_is_one_line_with_the_numbers_and_the_next_step(place: CachedRepository, run: Run) -> None:
    place.partial(FILE.etag).parent.mkdir(parents=True)
    place.partial(FILE.etag).symlink_to("/dev/full")  # the kernel's own: each write fails with ENOSPC
    with pytest.raises(
        ConfigError, match=rf"the disk of {place.cache} is full: 0\.0 MiB of 0\.1 MiB of model.*kept: free"
    ):
        run(Server([]))


def test_an_error_of_the_disk_is_not_tried_again(place: CachedRepository, run: Run) -> None:
    class Broken(Server):
        def iter_raw(self) -> Iterator[bytes]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    server = Broken([])
    with pytest.raises(OSError, match="Input/output error"):
        run(server)
    assert server.begins == [0]


def test_a_download_that_cannot_fit_is_refused_before_it_begins(place: CachedRepository) -> None:
    place.check_room(100, "--model owner/name", free_bytes=100)
    reason = r"--model owner/name needs 4\.00 GiB more in .*, where 1\.00 GiB are free: free 3\.00 GiB .*--download-dir"
    with pytest.raises(ConfigError, match=reason):
        place.check_room(4 << 30, "--model owner/name", free_bytes=1 << 30)
