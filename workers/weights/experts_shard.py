"""ExpertsShard: this rank's share of the experts of a layer, as a checkpoint names and shapes them."""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.spec.models.model_config import ExpertsConfig, TensorNames


@dataclass(frozen=True)
class ExpertsShard:
    """The elements `inner` of each expert's intermediate size, of the experts in the block `path` of the checkpoint."""

    path: str
    hidden_size: int
    config: ExpertsConfig
    names: TensorNames
    inner: range
