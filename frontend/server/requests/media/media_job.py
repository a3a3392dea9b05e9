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

T = TypeVar("T")  # what is read of the media

NeedBytes: TypeAlias = Callable[[list[bytes]], None]  # requests the bytes with these digests from the client


@dataclass(eq=False)
class MediaJob(Generic[T]):
    """Media of one request, pinned for `user` until the job is released. `reply` comes in the frontend's loop."""

    user: str
    media: list[Medium]
    owner: str
    scope: str  # whose uuids its media may use
    need: NeedBytes | None  # None: nobody can send the bytes again
    piece_s: float = 0.0  # longest piece of its only medium, an audio clip; 0: media stay whole
    reply: Reply[T] = field(default_factory=Reply)
    pinned: set[bytes] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    is_over: bool = False

    @property
    def source_user(self) -> str:
        """User of the pins of the bytes as they were sent."""
        return f"{self.user}-source"

    @contextlib.contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Name the place of a medium in its errors."""
        try:
            yield
        except RequestError as error:
            place = f"{MEDIUM[self.media[index].kind]} {index + 1} of {len(self.media)}"
            raise RequestError(f"the {place} cannot be taken: {error}") from None
