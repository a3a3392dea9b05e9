"""The device of the GPU tests. They run by `scripts/gpu_check`, never in CI, which rehearses a few of them."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first CUDA device; without one there is nothing to test."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
