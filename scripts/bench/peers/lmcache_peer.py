"""Store and load blocks by LMCache's own adapters: python lmcache_peer.py BLOCKS --block-bytes 368640

BLOCKS is a file with the content of all blocks. Speaks peer_protocol.py; a request opens an adapter, stores all blocks
under new names, or loads them:

    {"open": "fs", "type": "fs", "base_path": "/…"}     a name for the adapter, and LMCache's configuration of it
    {"store": "fs", "round": 3}                         {"seconds": 0.2, "num_good": 256}
    {"load": "fs", "round": 3}                          {"seconds": 0.2, "num_good": 256, "num_equal": 255}

Each store and load is one task of all blocks, as LMCache's controllers submit it. num_good counts the blocks that
LMCache reports as loaded, num_equal those whose bytes are the stored ones. LMCache's usage reports are off.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import select
import time
from pathlib import Path
from typing import Any

import peer_protocol

TASK_TIMEOUT_S = 120.0


def load(options: argparse.Namespace) -> tuple[dict[str, Any], peer_protocol.Answer]:
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    import torch
    from lmcache import __version__
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
    from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    content, size = Path(options.model).read_bytes(), options.block_bytes
    num_blocks = len(content) // size
    arena = mmap.mmap(-1, len(content))  # page-aligned, as O_DIRECT wants it
    memory = torch.frombuffer(arena, dtype=torch.uint8)
    shape = torch.Size([size])
    objects = [
        TensorMemoryObj(
            memory[start : start + size],
            MemoryObjMetadata(shape, torch.uint8, start, size, ref_count=1, fmt=MemoryFormat.KV_2LTD),
            parent_allocator=None,
        )
        for start in range(0, len(content), size)
    ]
    configs = {"fs": FSL2AdapterConfig, "resp": RESPL2AdapterConfig}
    adapters: dict[str, Any] = {}

    def keys_of(number: int) -> list[ObjectKey]:
        hashes = [hashlib.sha256(b"%d %d" % (number, block)).digest() for block in range(num_blocks)]
        return [ObjectKey(each, "model", 0) for each in hashes]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "open" in request:
            adapters[request.pop("open")] = create_l2_adapter(configs[request["type"]].from_dict(request))
            return {}
        keys = keys_of(request["round"])
        if "store" in request:
            arena[:] = content
            adapter = adapters[request["store"]]
            begun = time.perf_counter()
            task = adapter.submit_store_task(keys, objects)
            _wait(adapter.get_store_event_fd())
            seconds = time.perf_counter() - begun
            is_stored = adapter.pop_completed_store_tasks()[task].is_successful()
            return {"seconds": seconds, "num_good": num_blocks * is_stored}
        arena[:] = bytes(len(content))
        adapter = adapters[request["load"]]
        begun = time.perf_counter()
        task = adapter.submit_load_task(keys, objects)
        _wait(adapter.get_load_event_fd())
        seconds = time.perf_counter() - begun
        loaded = adapter.query_load_result(task)
        starts = range(0, len(content), size)
        num_equal = sum(arena[start : start + size] == content[start : start + size] for start in starts)
        num_good = sum(bool(loaded.test(block)) for block in range(num_blocks))
        return {"seconds": seconds, "num_good": num_good, "num_equal": num_equal}

    return {"version": __version__}, answer


def _wait(event_fd: int) -> None:
    """Wait for the end of a task."""
    if not select.select([event_fd], [], [], TASK_TIMEOUT_S)[0]:
        raise TimeoutError(f"no task ended within {TASK_TIMEOUT_S:g} s")
    os.read(event_fd, 8)


if __name__ == "__main__":
    raise SystemExit(peer_protocol.serve(__doc__, load, block_bytes=368_640))
