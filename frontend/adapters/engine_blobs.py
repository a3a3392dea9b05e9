"""EngineBlobs: all blobs that an engine or a gateway serves to others: decoded media, and adapters by their digests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...ipc.adapters.places import adapters_folder, gateway_adapters_folder
from ...ipc.adapters.whole_adapter import WholeAdapter
from ...ipc.blobs.channel import Blob
from ...ipc.blobs.store import BlobStore
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import RequestError


class EngineBlobs:
    """Finds a blob in the store of media, among the adapters of this engine, and among those of gateways."""

    def __init__(self, spec: EngineSpec) -> None:
        config, run = spec.config, spec.run_directory
        self._stores = [BlobStore(Path(run, "media"), config.media_store_bytes)]
        self._adapters = adapters_folder(run) if config.enable_lora else None
        if config.enable_lora and config.core_listen is not None:
            self._stores.append(BlobStore(gateway_adapters_folder(run), config.adapter_store_bytes))

    def open(self, digest: bytes) -> Blob | None:
        for store in self._stores:
            if (blob := store.open(digest)) is not None:
                return blob
        if self._adapters is not None:
            with contextlib.suppress(RequestError):  # there is none
                return WholeAdapter(self._adapters / digest.hex())
        return None
