"""The list of the features that take part in the steps of a model runner."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...ipc.process.arena import Arena
from ..machine.parallel import ParallelGroup
from ..step.input_batch import InputBatch
from ..step.runner_feature import RunnerFeature
from .adapters.adapter_fills import AdapterFills
from .adapters.adapter_loader import AdapterLoader
from .kv_copies.kv_copies import KVCopies
from .pooling.pooler import Pooler
from .pooling.pooling_layers import PoolingLayers
from .pooling.token_types import TokenTypes


def new_features(
    batch: InputBatch,
    blocks: Sequence[Tensor],
    group: ParallelGroup,
    arena: Arena | None,
    local_ranks: Sequence[int],
    media: RunnerFeature | None,
    adapters: AdapterLoader | None,
    pooling: PoolingLayers | None,
    drafter: RunnerFeature | None = None,
    has_token_types: bool = False,
) -> list[RunnerFeature]:
    """Return the features in the order of their parts in a step. blocks, arena, local_ranks: as for
    KVCopies. pooling: on rank 0, which alone returns results. has_token_types:
    of an encoder."""
    features: list[RunnerFeature] = []
    if arena is not None:
        features.append(KVCopies(arena, blocks, group, local_ranks))
    if media is not None:
        features.append(media)
    if adapters is not None:
        features.append(AdapterFills(adapters, batch, is_on_cpu=blocks[0].device.type == "cpu"))
    if has_token_types:
        features.append(TokenTypes())
    if pooling is not None:
        features.append(Pooler(pooling))
    if drafter is not None:
        features.append(drafter)
    return features
