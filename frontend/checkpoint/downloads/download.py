"""Download: fetches files of a repository into the hub's cache and keeps what it has of each when it is broken off.

huggingface_hub drops a file that is not whole; here the next download asks for the rest (RFC 9110, Range). Two
downloads of the same file take turns by a lock on its part.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from io import FileIO
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ....ipc.errors import ConfigError
from ....ipc.process.machine_memory import gib
from .cached import CachedRepository
from .repository import HubFile

NUM_THREADS = 4
NUM_TRIES = 5  # in a row without a new byte
STOP_TIMEOUT_S = 1.0  # for the other threads to keep what they have; one may wait for the network
LARGEST_BYTES = 50 * 10**9  # the hub sends larger files over its own protocol alone, which its client speaks
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DIGEST_CHARACTERS = 64  # of SHA-256, the etag of a large file


class Bar(Protocol):
    """Shows the progress, as tqdm does."""

    def update(self, n: float) -> object: ...


class Response(Protocol):
    """Answer to a request for a file, whose content is read in pieces."""

    status_code: int
    headers: Any

    def iter_raw(self) -> Any: ...


class Download:
    """One run over the missing files of a repository."""

    def __init__(
        self,
        place: CachedRepository,
        open_at: Callable[[HubFile, int], Any],
        bar: Bar,
        announce: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """`open_at`: returns a context with the Response to a request for a file from a byte on."""
        self._place = place
        self._open_at = open_at
        self._bar = bar
        self._announce = announce
        self._sleep = sleep
        self._stop_timeout_s = stop_timeout_s
        self._lock = threading.Lock()  # of the bar
        self._is_stopped = threading.Event()

    def run(self, files: Sequence[HubFile]) -> None:
        """Fetch the files, several at once, in daemon threads: Ctrl-C need not wait for the network. Raises the first
        error; ConfigError if the disk is full or a file is not what the hub says."""
        self._place.blob("").mkdir(parents=True, exist_ok=True)
        waiting = SimpleQueue[HubFile]()
        ended = SimpleQueue[BaseException | None]()
        for file in files:
            waiting.put(file)

        def work() -> None:
            while not self._is_stopped.is_set():
                try:
                    file = waiting.get_nowait()
                except Empty:
                    return
                try:
                    self._fetch(file)
                except BaseException as error:
                    ended.put(error)
                else:
                    ended.put(None)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(NUM_THREADS, len(files)))]
        for thread in threads:
            thread.start()
        try:
            for _ in files:
                if (error := ended.get()) is not None:
                    raise error
        finally:
            self._is_stopped.set()
            end = time.monotonic() + self._stop_timeout_s
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0.0))
            self._place.remove_if_empty()

    def _fetch(self, file: HubFile) -> None:
        path = self._place.partial(file.etag)
        blob = self._place.blob(file.etag)
        with path.open("ab+", buffering=0) as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._announce(f"{file.name}: another process fetches it; waiting for that")
                fcntl.flock(part, fcntl.LOCK_EX)
            if blob.exists():  # the other process has it
                self._update(file.num_bytes)
                path.unlink(missing_ok=True)
                return
            earlier = part.seek(0, 2)
            if earlier > file.num_bytes:
                earlier = part.truncate(0)
            self._update(earlier)
            try:
                is_whole = self._fetch_rest(file, part)
            except OSError as error:
                if error.errno in _FULL:
                    raise self._full(file) from None
                raise
            finally:
                if not part.seek(0, 2) and file.num_bytes:
                    path.unlink(missing_ok=True)
            if not is_whole:  # this download was stopped
                return
            if earlier and len(file.etag) == _DIGEST_CHARACTERS:
                self._check(file, part)
            path.replace(blob)

    def _fetch_rest(self, file: HubFile, part: FileIO) -> bool:
        """Append what is missing and return True; False if the download was stopped meanwhile. A lost connection is
        opened again, NUM_TRIES times in a row without a new byte."""
        tries = 0
        end = part.seek(0, 2)
        while end < file.num_bytes:
            begin = end
            lost: Exception | None = None
            try:
                with self._open_at(file, begin) as response:
                    self._append(part, response, begin)
            except Exception as error:  # of the disk, or of the hub's HTTP library
                if getattr(error, "errno", None) is not None or not _may_pass(error):
                    raise
                lost = error
            end = part.seek(0, 2)
            if self._is_stopped.is_set():
                return end == file.num_bytes
            if end < file.num_bytes:
                tries = 0 if end > begin else tries + 1
                if tries == NUM_TRIES:
                    raise lost or ConfigError(f"{file.name}: the hub sends nothing: try again later")
                reason = next(iter(str(lost or "").splitlines()), "") or "the connection is lost"
                self._announce(
                    f"{file.name}: {reason}; {gib(end)} of {gib(file.num_bytes)} are here, asking for the rest"
                )
                self._sleep(min(2.0**tries, 30.0) / 2)
        if end > file.num_bytes:
            part.truncate(0)
            raise ConfigError(f"{file.name}: the hub sent {end} bytes, it lists {file.num_bytes}: try again")
        return True

    def _append(self, part: FileIO, response: Response, begin: int) -> None:
        if begin and response.status_code != 206:  # the whole file in place of the rest
            part.truncate(0)
            part.seek(0)
            self._update(-begin)
        for piece in response.iter_raw():
            rest = memoryview(piece)
            while rest:
                rest = rest[part.write(rest) :]
            self._update(len(piece))
            if self._is_stopped.is_set():
                return

    def _check(self, file: HubFile, part: FileIO) -> None:
        """Compare the content of a file that was fetched in several parts with its etag."""
        part.seek(0)
        if hashlib.file_digest(part, "sha256").hexdigest() != file.etag:
            part.truncate(0)
            raise ConfigError(
                f"{file.name}: its parts are not the file that the hub lists, and were dropped: try again"
            )

    def _full(self, file: HubFile) -> ConfigError:
        have = self._place.partial(file.etag).stat().st_size
        return ConfigError(
            f"the disk of {self._place.cache} is full: {gib(have)} of {gib(file.num_bytes)} of {file.name} are there "
            f"and kept: free {gib(file.num_bytes - have)} and give the same command again, which fetches the rest"
        )

    def _update(self, num_bytes: int) -> None:
        with self._lock:
            self._bar.update(num_bytes)


def _may_pass(error: Exception) -> bool:
    """Whether a request may be answered at the next try: the connection was lost, or the server is busy."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return not 400 <= status < 500 or status in (408, 429)
