"""Folders with the files of adapters, for the ranks that load them. On the head an adapter is in the engine's store, or
in a blob that came from a gateway. On another host it is in a blob that is fetched from the head."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ....ipc.blobs.fetched_store import FetchedStore, HeadBlobs
from ....ipc.blobs.store import BlobStore
from ....ipc.errors import RequestError
from ....ipc.messages.adapter import FillSlot
from ....ipc.process.pacer import Pause
from ....ipc.spec.adapters.places import gateway_adapters_folder
from ....ipc.spec.adapters.whole_adapter import unpack
from ....ipc.spec.config.engine_spec import EngineSpec


class AdapterFolders(Protocol):
    """Interface for finding the folder of an adapter."""

    @contextmanager
    def open(self, order: FillSlot, pause: Pause) -> Iterator[Path]:
        """Yield the folder of the adapter that `order` names. It exists until the end of the context, unless the
        engine's store changes it. RequestError if a blob with the adapter is in no store. `pause` is called between
        pieces of the work."""


class StoredAdapters:
    """Adapters in the engine's store on this machine."""

    def __init__(self, of_gateways: AdapterFolders | None = None) -> None:
        """`of_gateways`: finds adapters without a folder."""
        self._of_gateways = of_gateways

    @contextmanager
    def open(self, order: FillSlot, pause: Pause) -> Iterator[Path]:
        if order.folder or self._of_gateways is None:
            yield Path(order.folder)
        else:
            with self._of_gateways.open(order, pause) as folder:
                yield folder


def adapter_folders(spec: EngineSpec) -> AdapterFolders:
    """Return the AdapterFolders of a rank on this host."""
    folder, limit = Path(spec.run_directory), spec.config.adapter_store_bytes
    if spec.is_on_head:
        return StoredAdapters(BlobAdapters(BlobStore(gateway_adapters_folder(spec.run_directory), limit), folder))
    head = HeadBlobs(spec.endpoints.blobs, spec.secure_to_head)
    return BlobAdapters(FetchedStore(folder / "adapters", limit, head, spec.config.start_timeout_s), folder)


class BlobAdapters:
    """Adapters that are blobs of a store, which may have to fetch them. Each load unpacks one into a temporary
    folder."""

    def __init__(self, store: BlobStore, run_directory: Path) -> None:
        self._store, self._run_directory = store, run_directory

    @contextmanager
    def open(self, order: FillSlot, pause: Pause) -> Iterator[Path]:
        content = self._store.open(order.digest)
        if content is None:
            raise RequestError(
                f"adapter {order.digest.hex():.16} is no longer in the engine's store: send the request again"
            )
        with content, tempfile.TemporaryDirectory(dir=self._run_directory, prefix="adapter-") as name:
            unpack(content, Path(name), pause)
            yield Path(name)
