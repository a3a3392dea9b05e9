"""Bytes behind URLs are put into the store once, pinned; uuids name them within their scope."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.frontend.server.sources.local_files import LocalFiles
from tokenloom.frontend.server.sources.media_sources import MediaSources
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.frontend.server.sources.web import ANSWER, Web, fetcher, with_web

HELLO = hashlib.sha256(b"hello").digest()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    store = BlobStore(tmp_path / "store", 1 << 20)
    yield store
    store.unpin(HELLO, "u")


@with_web
async def test_a_url_and_a_file_give_the_digest_of_their_bytes(server: Web, store: BlobStore, tmp_path: Path) -> None:
    server.answers.update(
        {"/x": [ANSWER], "/bad": [b"HTTP/1.1 500 No\r\n\r\n"], "/empty": [b"HTTP/1.1 200 OK\r\n\r\n"]}
    )
    (tmp_path / "f").write_bytes(b"hello")
    sources = MediaSources(store, fetcher(), LocalFiles(str(tmp_path), 10))
    for url in (server.url("/x"), f"FILE://{tmp_path}/f"):
        assert await sources.fetch(url, "u") == HELLO
    for path in ("/bad", "/empty"):
        with pytest.raises(RequestError):
            await sources.fetch(server.url(path), "u")
    assert [file.name for file in store.folder.files()] == [HELLO.hex()]


def test_a_uuid_names_bytes_within_its_scope(store: BlobStore) -> None:
    sources = MediaSources(store, fetcher(), LocalFiles(None, 10))
    with pytest.raises(RequestError, match="no medium with uuid 'cat'"):
        sources.find("key", "cat", "u")
    sources.note("key", "cat", store.put(b"hello"))
    assert sources.find("key", "cat", "u") == HELLO
    with pytest.raises(RequestError, match="no medium with uuid 'cat'"):
        sources.find("other key", "cat", "u")


def test_a_uuid_is_forgotten_with_its_bytes(store: BlobStore) -> None:
    sources = MediaSources(store, fetcher(), LocalFiles(None, 10))
    sources.note("key", "cat", store.put(b"hello"))
    (store.folder.path / HELLO.hex()).unlink()
    with pytest.raises(RequestError, match="no medium"):
        sources.find("key", "cat", "u")
