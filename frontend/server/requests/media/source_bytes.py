"""SourceBytes: brings the bytes of media into the blob store, from clients and from URLs, and pins them for a job.

Runs in the loop of MediaManager's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from .....ipc.blobs.store import BlobStore
from .....ipc.errors import Overloaded, RequestError
from .....ipc.messages.client import Medium
from ....forms.media.data_url import decode_data_url, is_data_url
from ...sources.media_sources import MediaSources
from .media_job import MediaJob
from .media_puts import MediaPuts

MAX_ASKS = 3  # how often the same bytes are requested, or the same medium is read, for one job


class SourceBytes:
    """Finder of the bytes of media: in the store, at a client, at a URL or under a uuid."""

    def __init__(
        self,
        store: BlobStore,
        puts: MediaPuts,
        sources: MediaSources,
        is_read: Callable[[MediaJob[Any], Medium], bool],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`is_read`: whether the file of a medium is known and in the store, and so pinned for the job. `post` makes
        the frontend's loop call a function."""
        self._store, self._puts, self._sources = store, puts, sources
        self._is_read, self._post = is_read, post

    async def take(self, job: MediaJob[Any], sources: set[bytes]) -> list[bytes]:
        """Return the digests of the source bytes of a job's media. Pin the bytes and add their digests to `sources`,
        except those whose media file is in the store already. Bytes at a URL are fetched only if they are not in the
        store; RequestError if they are others than the job names."""
        await self._arrive(job, sources)
        found: list[bytes] = []
        for medium in job.media:
            digest = medium.digest
            if not digest or (medium.url and not self._take(job, medium, sources)):
                with job.naming(len(found)):
                    digest = await self._fetch(job, medium)
                    sources.add(digest)
                    if medium.digest not in (b"", digest):
                        raise RequestError("its URL has other bytes by now than when the request began: send it again")
            if medium.uuid:
                self._sources.note(job.scope, medium.uuid, digest)
            found.append(digest)
        job.sources = found
        return found

    async def _arrive(self, job: MediaJob[Any], sources: set[bytes]) -> None:
        """Wait until the source bytes that a job names by digest alone are in the store, pin them and add their digests
        to `sources`. Ask the client for missing ones. Overloaded if bytes are still missing after that."""
        wanted = {each.digest: each for each in job.media if each.digest and not each.url}
        for _ in range(1 + MAX_ASKS):
            missing = []
            for digest, medium in wanted.items():
                await self._puts.finish(digest)
                if not self._take(job, medium, sources):
                    missing.append(digest)
                self._puts.release(digest)
            if not missing:
                return
            if job.need is None:
                break
            arrivals = [self._puts.arrival(digest) for digest in missing]
            self._post(partial(job.need, missing))
            await asyncio.gather(*(each.wait() for each in arrivals))
        raise Overloaded("media of the request were dropped from a full store before they were read: send them again")

    def _take(self, job: MediaJob[Any], medium: Medium, sources: set[bytes]) -> bool:
        """Pin the bytes with a medium's digest and add it to `sources`, unless its media file is known and in the
        store. Return False if the store has neither."""
        digest = medium.digest
        if digest in sources or self._is_read(job, medium):
            return True
        if not self._store.pin(digest, job.source_user):
            return False
        sources.add(digest)
        return True

    async def _fetch(self, job: MediaJob[Any], medium: Medium) -> bytes:
        if is_data_url(medium.url):
            return await self._puts.put(decode_data_url(medium.url), job.source_user)
        if not medium.url:
            return self._sources.find(job.scope, medium.uuid, job.source_user)
        return await self._puts.patiently(lambda: self._sources.fetch(medium.url, job.source_user))
