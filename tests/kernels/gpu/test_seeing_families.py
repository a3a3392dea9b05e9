"""Models that see images have the logits of transformers with the Triton kernels, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.models.test_seeing_families import check


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_logits_with_images_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    check(family, tiny_checkpoint(tmp_path, family, seed=1), TritonOps(90), 0, grids={"a": [(2, 2)]})
