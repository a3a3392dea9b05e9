"""MediaPuts: writes bytes of media into the blob store, and keeps them there until the requests that need them arrive.

Runs in the loop of MediaManager's thread, except `new_user`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from .....ipc.blobs.store import BlobStore
from .....ipc.errors import Overloaded, RequestError, TokenloomError
from .....ipc.messages.client import PutMedium
from .....ipc.shortages.failure import failure_of
from ....forms.media_limits import MediaLimits

T = TypeVar("T")

WAIT_S = 60.0  # longest wait for room in the store, and for all media of a request to be read
HOLD_S = 30.0  # how long bytes that arrive before their request are kept for it
RETRY_S = 2.0  # longest time between attempts to get room in a full store
MAX_PUT_BYTES = 256 << 20  # most bytes of media that wait to be written
MAX_FAILED = 1 << 14  # most errors that are kept for requests


class MediaPuts:
    """Owner of the bytes that clients send, until their requests arrive. `released` is set when something is unpinned,
    so that the store may have room."""

    def __init__(self, store: BlobStore, limits: MediaLimits) -> None:
        self.released = asyncio.Event()
        self.hold_s, self.retry_s = HOLD_S, RETRY_S
        self._store, self._limits = store, limits
        self._numbers = itertools.count()
        self._num_bytes = 0
        self._holders: dict[bytes, list[str]] = {}  # by digest: users of the pins that keep bytes for a request
        self._tasks: dict[bytes, asyncio.Task[None]] = {}  # by digest: the task that writes the bytes
        self._failed: OrderedDict[bytes, TokenloomError] = OrderedDict()  # by digest, until they are raised
        self._arrivals: dict[bytes, asyncio.Event] = {}  # by digest: bytes that requests wait for

    def begin(self, message: PutMedium) -> None:
        """Start to write the bytes of a medium. If this fails, `finish` raises the error."""
        digest = message.digest
        if digest in self._tasks:
            return
        self._failed.pop(digest, None)
        self._num_bytes += len(message.data)
        self._tasks[digest] = new_task(self._put(digest, message.data))

    async def finish(self, digest: bytes) -> None:
        """Wait until bytes with this digest are written, if they are being written. Raise the error if they could not
        be."""
        if digest in self._tasks:
            await asyncio.wait([self._tasks[digest]])
        if digest in self._failed:
            raise self._failed.pop(digest)

    def arrival(self, digest: bytes) -> asyncio.Event:
        """Return an event that is set when bytes with this digest have been written, or their writing has failed."""
        return self._arrivals.setdefault(digest, asyncio.Event())

    def new_user(self) -> str:
        """Return a new name for the holder of a pin: a request that is about to arrive. Any thread may call it."""
        return f"hold-{next(self._numbers)}"

    def hold(self, digest: bytes, user: str) -> None:
        """Unpin a blob, which is pinned for `user`, after HOLD_S or in `release`."""
        self._holders.setdefault(digest, []).append(user)
        asyncio.get_running_loop().call_later(self.hold_s, self._unhold, digest, user)

    def release(self, digest: bytes) -> None:
        """Unpin a blob that `hold` keeps for requests, since a request for it has arrived."""
        self._unhold(digest, *self._holders.get(digest, ()))

    async def put(self, data: bytes | memoryview, user: str) -> bytes:
        """Write bytes to the store, pinned for `user`, and return their digest. RequestError if they are too large,
        Overloaded if the store stays full for WAIT_S."""
        self._limits.check_bytes(len(data))
        return await self.patiently(lambda: asyncio.to_thread(self._store.put, data, user))

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` again while it raises Overloaded (a full store), and return its result. After WAIT_S, raise the
        Overloaded."""
        end = time.monotonic() + WAIT_S
        while True:
            self.released.clear()
            try:
                return await work()
            except Overloaded:
                if time.monotonic() >= end:
                    raise
            with contextlib.suppress(TimeoutError):  # another process may unpin something, which does not set the event
                async with asyncio.timeout(self.retry_s):
                    await self.released.wait()

    async def _put(self, digest: bytes, data: memoryview) -> None:
        try:
            if self._num_bytes > MAX_PUT_BYTES:
                raise Overloaded(f"{self._num_bytes} bytes of media wait to be written: ask again later")
            user = self.new_user()
            found = await self.put(data, user)
            self.hold(found, user)
            if found != digest:
                raise RequestError(f"the digest of a medium is {found.hex()}, the client says {digest.hex()}")
        except Exception as error:  # kept for the request, without the traceback, whose frames refer to the bytes
            self._failed[digest] = failure_of(error, "a medium cannot be kept").with_traceback(None)
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
        finally:
            self._num_bytes -= len(data)
            del self._tasks[digest]
            if (arrival := self._arrivals.pop(digest, None)) is not None:
                arrival.set()

    def _unhold(self, digest: bytes, *users: str) -> None:
        holders = self._holders.get(digest, [])
        for user in users:
            if user in holders:
                holders.remove(user)
                self._store.unpin(digest, user)
        if not holders:
            self._holders.pop(digest, None)
        self.released.set()


_tasks: set[asyncio.Task[Any]] = set()  # an event loop has only weak references to its tasks


def new_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine as a task of the running loop, and keep a reference to the task until it is done."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task
