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

    @property
    def stacks(self) -> tuple[str, str]:
        """The names of the tensors that hold all experts: gates and ups, downs."""
        gate_up, down = self.names.expert_stacks
        return f"{self.path}.{gate_up}", f"{self.path}.{down}"
