"""Folders in which an engine keeps adapters: in the user's cache folder or, if that cannot be written, in the run
directory, which is removed when the engine ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..config.cache_folder import private_cache


def adapters_folder(run_directory: str) -> Path:
    """Create and return the folder of the store for adapters that this engine's frontends have loaded."""
    return _folder(run_directory, "adapters")


def gateway_adapters_folder(run_directory: str) -> Path:
    """Create and return the folder of the blob store for adapters fetched from gateways."""
    return _folder(run_directory, "gateway-adapters")


def _folder(run_directory: str, name: str) -> Path:
    with contextlib.suppress(OSError, RuntimeError):
        root = private_cache(name)
        if os.access(root, os.W_OK):
            return root
    root = Path(run_directory, name)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root
