"""Biases by distance are those of MPNet's buckets in transformers and of ALiBi's published slopes."""

from __future__ import annotations

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from tokenloom.ipc.spec.models.model_config import PositionBiasConfig
from tokenloom.workers.layers.position_bias import buckets_of, slopes_of


def test_buckets_equal_transformers_at_every_distance() -> None:
    distances = torch.arange(-700, 701)
    expected = MPNetEncoder.relative_position_bucket(distances)
    assert torch.equal(buckets_of(distances, PositionBiasConfig(kind="buckets")), expected)


def test_slopes_are_a_geometric_sequence_and_further_heads_stand_between_them() -> None:
    assert slopes_of(8) == [2.0**-power for power in range(1, 9)]
    assert slopes_of(12) == [2.0**-power for power in range(1, 9)] + [2.0**-power for power in (0.5, 1.5, 2.5, 3.5)]
