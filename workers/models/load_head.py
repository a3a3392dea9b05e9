"""Loading of a draft head: opens its checkpoint, and refuses tensors of an EAGLE-3 head that it has not read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from ...ipc.spec.config.speculation import DraftSpec
from ...ipc.spec.drafts.head_config import HeadConfig
from ...kernels.select import Ops
from ..machine.parallel import ParallelGroup
from ..weights.loader import LayerLoader
from ..weights.opening import open_checkpoint
from ..weights.quantized_weights import is_spare
from .decoder import DecoderModel
from .eagle_head import EagleHead
from .mtp_head import MtpHead

DraftHead: TypeAlias = EagleHead | MtpHead

IGNORED = ["t2d"]  # says which of the model's tokens an EAGLE-3 head can guess: d2t does, too


def load_head(
    draft: DraftSpec,
    head: HeadConfig,
    target: DecoderModel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    group: ParallelGroup,
) -> DraftHead:
    """Load this rank's shard of the head of `draft`. target: the engine's model. ConfigError as for `load_model`."""
    config = draft.model
    with open_checkpoint(Path(draft.folder), dtype, device, config.quantization) as checkpoint:
        loader = LayerLoader(checkpoint, ops, group)
        if head.kind == "mtp":  # the other tensors are the model's
            return MtpHead(loader, config, head, target, max_model_len)
        model = EagleHead(loader, config, head, target, max_model_len)
        if group.rank == 0:
            checkpoint.refuse_unread(IGNORED, partial(is_spare, checkpoint))
        return model


def moved(draft: DraftSpec, folder: Path) -> DraftSpec:
    """Return the spec of a head that is a part of the model with the model's checkpoint, which is in `folder` now."""
    is_part = draft.head is not None and draft.head.kind == "mtp"
    return msgspec.structs.replace(draft, folder=str(folder)) if is_part else draft
