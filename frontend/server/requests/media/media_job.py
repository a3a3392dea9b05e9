"""MediaJob: the media of one request while they are read and used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from .....ipc.errors import RequestError
from .....ipc.messages.client import Medium
from .....ipc.messages.media import MEDIUM
from ...helpers.task import Reply

T = TypeVar("T")  # the result of the job

NeedBytes: TypeAlias = Callable[[list[bytes]], None]  # asks the client to send the bytes with these digests


@dataclass(eq=False)
class MediaJob(Generic[T]):
    """The reading of one request's media, which stay pinned for `user` until the job is released. `reply` gets the
    result in the frontend's loop."""

    user: str
    media: list[Medium]
    owner: str  # key of the caller, for fair queueing
    scope: str  # cache salt: media may refer to uuids of requests with the same one
    need: NeedBytes | None  # None: the bytes cannot be sent again
    piece_s: float = 0.0  # longest piece, if the only medium is an audio clip to cut; 0: media stay whole
    reply: Reply[T] = field(default_factory=Reply)
    pinned: set[bytes] = field(default_factory=set)  # digests of media files
    sources: list[bytes] = field(default_factory=list)  # digests of the bytes of the media, once they are there
    task: asyncio.Task[None] | None = None
    is_over: bool = False  # released: the result is dropped

    @property
    def source_user(self) -> str:
        """The user of pins on the source bytes of the media."""
        return f"{self.user}-source"

    @contextlib.contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Put the kind and the number of the medium at `index` into RequestErrors that are raised in the context."""
        try:
            yield
        except RequestError as error:
            place = f"{MEDIUM[self.media[index].kind]} {index + 1} of {len(self.media)}"
            raise RequestError(f"the {place} cannot be taken: {error}") from None
