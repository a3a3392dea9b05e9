"""Where a rank finds the files of an adapter that it is ordered to load: on the head in the engine's store, on another
host in a blob that it fetches from the head."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ...ipc.adapters.whole_adapter import unpack
from ...ipc.blobs.fetched_store import FetchedStore, HeadBlobs
from ...ipc.blobs.store import BlobStore
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import RequestError
from ...ipc.messages.adapter import FillSlot
from ...ipc.process.pacer import Pause


class AdapterFolders(Protocol):
    """Interface for finding the folder of an adapter."""

    @contextmanager
    def open(self, order: FillSlot, pause: Pause) -> Iterator[Path]:
        """Yield the folder, which stays until the end of the context."""


class StoredAdapters:
    """The engine's store, on this machine."""

    @contextmanager
    def open(self, order: FillSlot, pause: Pause) -> Iterator[Path]:
        yield Path(order.folder)


def adapter_folders(spec: EngineSpec) -> AdapterFolders:
    """Return the folders for a rank on this host."""
    if spec.is_on_head:
        return StoredAdapters()
    head, folder = HeadBlobs(spec.endpoints.blobs, spec.secure_to_head), Path(spec.run_directory)
    limit, timeout_s = spec.config.adapter_store_bytes, spec.config.start_timeout_s
    return FetchedAdapters(FetchedStore(folder / "adapters", limit, head, timeout_s), folder)


class FetchedAdapters:
    """Adapters as blobs of a store that fetches them; files are written for one load, and removed."""

    def __init__(self, store: BlobStore, run_directory: Path) -> None:
        self._store, self._run_directory = store, run_directory

    @contextmanager
    def open(self, order: FillSlot, pause: Pause) -> Iterator[Path]:
        content = self._store.open(order.digest)
        if content is None:
            raise RequestError(f"adapter {order.digest.hex():.16} is no longer on the head: send the request again")
        with content, tempfile.TemporaryDirectory(dir=self._run_directory, prefix="adapter-") as name:
            unpack(content, Path(name), pause)
            yield Path(name)
