"""GatewayBlobs: fetches the blobs that requests of gateways need, and releases the requests that wait for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ....ipc.blobs.store import BlobStore
from ....ipc.messages.blobs import GetBlob
from ....ipc.process.descriptors import descriptor_limit
from ....ipc.spec.adapters.places import gateway_adapters_folder
from ....ipc.spec.config.engine_spec import EngineSpec
from .blob_fetcher import Ask, BlobFetcher
from .needed_blobs import NeededBlobs

PINS_SHARE = 4  # of the descriptors that this process may have, pinned blobs take at most 1 / PINS_SHARE


class GatewayBlobs:
    """Owner of the NeededBlobs and of their fetcher. Media go to the same store as those of this engine's frontends,
    where ranks on this host find them."""

    def __init__(self, spec: EngineSpec) -> None:
        config, run = spec.config, spec.run_directory
        media, adapters = BlobStore(Path(run, "media"), config.media_store_bytes), None
        if config.enable_lora:
            adapters = BlobStore(gateway_adapters_folder(run), config.adapter_store_bytes)
        self.fetcher = BlobFetcher(media, adapters)
        self.needed = NeededBlobs(self.fetcher, max(descriptor_limit() // PINS_SHARE, 16))

    def go_on(self, ask: Callable[[int, GetBlob], None]) -> None:
        """Apply the news of blobs, and send the fetcher's messages. `ask`: sends a message to a frontend."""
        for each in self.fetcher.take():
            if isinstance(each, Ask):
                ask(each.frontend_id, each.message)
            else:
                self.needed.on_news(each)
