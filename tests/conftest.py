"""Selects Triton's interpreter if there is no GPU, before anything imports triton, and sleeping waits for OpenMP.

Temporary folders have short names, since engines put sockets there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# As the engine's workers do. Spinning threads of several test processes would take each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")
