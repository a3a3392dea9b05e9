"""ExpertsShard: this rank's shard of a layer's experts, with their names and sizes in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.spec.models.model_config import ExpertsConfig, TensorNames


@dataclass(frozen=True)
class ExpertsShard:
    """The elements `inner` of the intermediate size of each expert in the block `path` of the checkpoint."""

    path: str
    hidden_size: int
    config: ExpertsConfig
    names: TensorNames
    inner: range
