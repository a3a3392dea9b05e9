"""EngineBlobs: all blobs that an engine or a gateway serves to others: decoded media, and adapters by their digests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..errors import RequestError
from ..spec.adapters.places import adapters_folder, gateway_adapters_folder
from ..spec.adapters.whole_adapter import WholeAdapter
from ..spec.config.engine_spec import EngineSpec
from .channel import Blob
from .store import BlobStore


class EngineBlobs:
    """Lookup of a blob in the media store, in the store of adapters fetched from gateways, and among this engine's own
    adapters, in this order."""

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
            with contextlib.suppress(RequestError):  # the engine has no such adapter
                return WholeAdapter(self._adapters / digest.hex())
        return None
