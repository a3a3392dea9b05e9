"""MediaSources: puts the bytes of media that requests name by URL into the blob store, and remembers media by uuid.

A uuid is a caller's own name for bytes that the engine has had before. It is valid only in requests of the same scope
(their cache_salt), and is never part of the key of a KV block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

from ....ipc.blobs.store import BlobStore
from ....ipc.blobs.writer import BlobWriter
from ....ipc.errors import RequestError
from ....ipc.spec.config.engine_config import EngineConfig
from .http_fetch import HttpFetcher
from .local_files import LocalFiles
from .media_url import AllowedDomains, shown

MAX_FETCHES = 32  # fetches at the same time; further ones wait
MAX_UUIDS = 1 << 16
WRITE_BYTES = 1 << 20


class MediaSources:
    """Owner of the running fetches and of the table of uuids. It runs in an event loop; files are read in threads."""

    def __init__(self, store: BlobStore, http: HttpFetcher, files: LocalFiles) -> None:
        self._store, self._http, self._files = store, http, files
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self._digest_by_uuid: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    @classmethod
    def of(cls, store: BlobStore, config: EngineConfig) -> MediaSources:
        """Return the sources that an engine's options allow."""
        domains, root, most = config.allowed_media_domains, config.allowed_local_media_path, config.max_media_bytes
        http = HttpFetcher(AllowedDomains(domains or ()), most, config.media_fetch_timeout_s)
        return cls(store, http, LocalFiles(root or None, most))

    async def fetch(self, url: str, user: str) -> bytes:
        """Put the content of an http(s): or file: URL into the store, pinned for `user`, and return its digest.
        RequestError if the content may not or cannot be read, is too large or, for http(s), empty; Overloaded if the
        store is full or another resource is short."""
        if url[:5].lower() == "file:":
            return await asyncio.to_thread(self._store.put, self._files.read(url), user)
        async with self._turns:
            writer = await asyncio.to_thread(BlobWriter, self._store.folder, 0)
            try:
                async with contextlib.aclosing(self._http.fetch(url)) as parts:
                    gathered = bytearray()
                    async for part in parts:
                        gathered += part
                        if len(gathered) >= WRITE_BYTES:
                            await asyncio.to_thread(writer.write, bytes(gathered))
                            gathered.clear()
                await asyncio.to_thread(writer.write, bytes(gathered))
                if not writer.num_bytes:
                    raise RequestError(f"{shown(url)} is empty: check the URL, or send the file itself")
                await asyncio.to_thread(self._store.add, writer, user)
                return writer.digest()
            finally:
                writer.close()

    def note(self, scope: str, uuid: str, digest: bytes) -> None:
        """Let requests of a scope refer to these bytes by `uuid`. A later call for the same uuid replaces the earlier
        one. Only the MAX_UUIDS used last are remembered."""
        self._digest_by_uuid[scope, uuid] = digest
        self._digest_by_uuid.move_to_end((scope, uuid))
        if len(self._digest_by_uuid) > MAX_UUIDS:
            self._digest_by_uuid.popitem(last=False)

    def find(self, scope: str, uuid: str, user: str) -> bytes:
        """Return the digest of the bytes with this uuid, and pin them for `user`. RequestError if the engine does not
        have them."""
        digest = self._digest_by_uuid.get((scope, uuid))
        if digest is None or not self._store.pin(digest, user):
            raise RequestError(f"the engine has no medium with uuid {uuid[:80]!r}: send the file itself with it")
        self._digest_by_uuid.move_to_end((scope, uuid))
        return digest
