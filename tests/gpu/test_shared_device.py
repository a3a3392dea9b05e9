"""On a GPU that two ranks share, over gloo: collectives and logits are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.machine.test_parallel import logits_of_ranks

pytestmark = pytest.mark.gpu


def test_two_ranks_on_one_device_give_the_logits_of_one_rank(device: torch.device, tmp_path: Path) -> None:
    folders = [tiny_checkpoint(tmp_path / family, family) for family in ("cohere_plus", "qwen3_moe")]
    for name, actual, expected in logits_of_ranks(tmp_path, 2, folders, device=f"{device.type}:0"):
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)
