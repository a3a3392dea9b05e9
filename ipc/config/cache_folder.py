"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tokenloom, or ~/.cache/tokenloom if that variable is no absolute path. RuntimeError for a
    user without a home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "tokenloom"
