"""A runner has the features that its engine needs, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.messages.base import Rank
from tokenloom.tests.support.checkpoints import tiny_model
from tokenloom.tests.workers.features.kv_copies.test_kv_copies import bytes_of, new_arena_of
from tokenloom.workers.features.adapters.adapter_loader import AdapterLoader
from tokenloom.workers.features.new import new_features
from tokenloom.workers.features.pooling.pooling_layers import PoolingLayers
from tokenloom.workers.machine.parallel import NullGroup
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.runner_feature import RunnerFeature


@pytest.mark.parametrize(
    ("rank", "has_all", "kinds"),
    [
        (0, False, ["Pooler"]),
        (1, False, []),
        (0, True, ["KVCopies", "RunnerFeature", "AdapterFills", "Pooler"]),
        (1, True, ["KVCopies", "RunnerFeature", "AdapterFills"]),
    ],
)
def test_features_are_those_that_the_engine_needs_and_rank_0_alone_pools(
    rank: int, has_all: bool, kinds: list[str], tmp_path: Path
) -> None:
    kv_cache = torch.zeros(9, 1, 2, 1, 4, 1)
    features = new_features(
        InputBatch(2, 8, 4, [9]),
        [bytes_of(kv_cache)],
        NullGroup(rank, 2),
        arena=new_arena_of(64) if has_all else None,
        local_ranks=[0, 1],
        media=RunnerFeature() if has_all else None,
        adapters=AdapterLoader(Rank(0, rank), 1) if has_all else None,
        pooling=None if rank else PoolingLayers(tiny_model(tmp_path, "llama")),
    )
    assert [type(each).__name__ for each in features] == kinds
