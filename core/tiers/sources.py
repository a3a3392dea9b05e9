"""The sources that an engine's options name."""

from __future__ import annotations

from pathlib import Path

from ...ipc.messages.tier import SOURCES
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.config.tier_places import listen_address_of, peer_addresses
from .disk import DiskSource
from .network.peer import PeerSource
from .network.remote import RemoteSource
from .reports import Reports
from .source import Source


def new_sources(spec: EngineSpec, reports: Reports) -> dict[int, Source]:
    """Return the configured sources by their index in SOURCES, in the order in which they are looked up."""
    config, sources = spec.config, list[Source]()
    if config.kv_disk is not None:
        folder, max_bytes = Path(config.kv_disk), config.kv_disk_bytes // config.data_parallel_size
        folder = folder / f"replica-{spec.replica}" if spec.replica else folder  # each folder has one writer
        sources.append(DiskSource(folder, max_bytes, config.kv_quota, reports.touch))
    if config.kv_remote is not None:
        sources.append(RemoteSource(config.kv_remote, reports.touch))
    if peers := [address for address in peer_addresses(config.kv_peers) if address != listen_address(spec)]:
        sources.append(PeerSource(peers, reports.touch))
    return {SOURCES.index(source.name): source for source in sources}


def listen_address(spec: EngineSpec) -> str | None:
    """Return the address from which other engines load the blocks of this replica; None if --kv-listen is not set."""
    address = spec.config.kv_listen
    return None if address is None else listen_address_of(address, spec.replica)
