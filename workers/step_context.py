"""StepContext: everything that the layers read in one step besides tokens and weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kernels.contract import AttentionMetadata


@dataclass(frozen=True, eq=False)
class StepContext:
    """Made anew for each step, as its metadata is. A new input of the layers becomes a field here."""

    metadata: AttentionMetadata
    kv_cache: Tensor  # as in KVCacheSpec.shape; the layers write the step's keys and values
