"""Selects Triton's interpreter if there is no GPU, before anything imports triton.

Temporary folders have short names, since engines put sockets there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")
