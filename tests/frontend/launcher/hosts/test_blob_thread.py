"""Ranks on other hosts fetch adapters and media from the head, if they have the group's keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend.launcher.hosts.blob_thread import BlobThread
from tokenloom.ipc.blobs.fetched_store import FetchedStore, HeadBlobs
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import Overloaded
from tokenloom.ipc.messages.adapter import FillSlot
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.ipc.spec.adapters.places import adapters_folder
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.adapter_bytes import linear_pair, write_adapter_bytes
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.workers.features.adapters.adapter_folders import BlobAdapters

LIMIT = 1 << 24
TIMEOUT_S = 20.0


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = EngineConfig(enable_lora=True)
    return new_spec(run_directory=str(tmp_path), config=config, group_keys=Keys.generate(), host_address="127.0.0.1")


@pytest.fixture
def head(spec: EngineSpec) -> Iterator[BlobThread]:
    assert spec.group_keys is not None
    thread = BlobThread(spec, spec.group_keys)
    yield thread
    thread.close()


def new_store(folder: Path, head: BlobThread, keys: Keys | None, timeout_s: float = TIMEOUT_S) -> FetchedStore:
    assert keys is not None
    return FetchedStore(folder, LIMIT, HeadBlobs(head.address, keys.secure_client), timeout_s)


def test_a_medium_is_fetched_once_if_the_head_has_it(spec: EngineSpec, head: BlobThread, tmp_path: Path) -> None:
    content = os.urandom(3_500_000)
    digest = BlobStore(tmp_path / "media", LIMIT).put(content)
    store = new_store(tmp_path / "there", head, spec.group_keys)
    for each in (store, BlobStore(tmp_path / "there", LIMIT)):
        assert each.open(digest) == content
    assert store.open(bytes(32)) is None


def test_an_adapter_is_fetched_by_its_digest(spec: EngineSpec, head: BlobThread, tmp_path: Path) -> None:
    adapter = write_adapter_bytes(tmp_path / "adapter", linear_pair("x", 8, 64, 8))
    digest = adapter_digest(adapter)
    adapter.rename(adapters_folder(spec.run_directory) / digest.hex())
    folders = BlobAdapters(new_store(tmp_path / "there", head, spec.group_keys), tmp_path)
    with folders.open(FillSlot(slot=1, digest=digest, folder="/only/on/the/head"), lambda: None) as folder:
        assert adapter_digest(folder) == digest
    assert not folder.exists()


def test_a_rank_with_other_keys_gets_nothing(spec: EngineSpec, head: BlobThread, tmp_path: Path) -> None:
    assert spec.group_keys is not None
    digest = BlobStore(tmp_path / "media", LIMIT).put(b"content")
    other = msgspec.structs.replace(Keys.generate(), server_public=spec.group_keys.server_public)
    with pytest.raises(Overloaded, match="did not come from the head within 1 s"):
        new_store(tmp_path / "there", head, other, 1.0).open(digest)
