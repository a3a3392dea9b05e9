"""MXFP4 dequantizes to the values of its specification, in any shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.quantized import QuantizedWeight, as_floats
from tokenloom.tests.support.quantized_checkpoints import E2M1, mxfp4_pair
from tokenloom.workers.weights.checkpoint import Checkpoint
from tokenloom.workers.weights.experts import load_experts
from tokenloom.workers.weights.experts_shard import ExpertsShard
from tokenloom.workers.weights.mxfp4 import as_codes, dequantize

BLOCKS = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)


def test_every_byte_with_every_scale_is_the_table_s_value() -> None:
    blocks = BLOCKS.view(1, 16, 16).expand(256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    actual = dequantize(blocks, scales, torch.float64).view(256, 256, 2)
    for byte in range(256):
        pair = np.array([E2M1[byte % 16], E2M1[byte // 16]])
        exact = pair * 2.0 ** (np.arange(253, dtype=np.float64)[:, None] - 127)  # the next may exceed float32
        np.testing.assert_array_equal(actual[:253, byte].numpy(), exact.astype(np.float32))
    assert actual[255].isnan().all()


def test_codes_stand_for_the_same_values() -> None:
    scales = torch.randint(100, 140, (4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    scales[2, 1] = 255
    found = as_codes(BLOCKS, scales, torch.bfloat16)
    torch.testing.assert_close(
        found.dequantize(), dequantize(BLOCKS, scales, torch.bfloat16), rtol=0, atol=0, equal_nan=True
    )
    assert found.nbytes == 4 * 64 + 4 * 4 * 4 and found.levels is not None and max(found.levels) == 12


@pytest.mark.parametrize("keeps_mxfp4", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shards_of_codes_equal_shards_of_the_floats(num_ranks: int, keeps_mxfp4: bool, tmp_path: Path) -> None:
    """Those of down projections that begin inside a group of 32 become floats."""
    for rank in range(num_ranks):
        shard = range(96 // num_ranks * rank, 96 // num_ranks * (rank + 1))
        loaded = []
        for folder in mxfp4_pair(tmp_path / str(rank), intermediate_size=96):
            config = load_model_config(folder)
            assert config.experts is not None
            with Checkpoint(folder, torch.float32, torch.device("cpu"), config.quantization) as checkpoint:
                experts = ExpertsShard("model.layers.1.mlp.experts", 64, config.experts, config.names, shard)
                loaded.append(load_experts(checkpoint, experts, keeps_mxfp4=keeps_mxfp4))
        for axis, (ours, theirs) in enumerate(zip(*loaded, strict=True)):
            for each, exact in zip(ours, theirs, strict=True):
                has_codes = keeps_mxfp4 and (axis == 0 or num_ranks % 2 == 1)
                assert isinstance(each, QuantizedWeight) == has_codes
                assert torch.equal(as_floats(each), as_floats(exact))
