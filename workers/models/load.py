"""Loading of a DecoderModel: opens the checkpoint, finds its names, and refuses tensors that no layer has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from ...ipc.spec.kv.kv_groups import KVGroup, kv_groups
from ...ipc.spec.models.model_config import ModelConfig, TensorNames
from ...ipc.spec.models.pooling.heads import head_tensors
from ...kernels.select import Ops
from ..layers.position_bias import make_position_bias
from ..layers.rotary import make_rotary
from ..machine.parallel import ParallelGroup
from ..weights.adapted_layers import Adaptable, AdaptedLayers
from ..weights.checkpoint import Checkpoint
from ..weights.loader import LayerLoader
from ..weights.opening import open_checkpoint
from ..weights.quantized_weights import is_spare
from .decoder import DecoderModel


def load_model(
    folder: Path,
    config: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    group: ParallelGroup,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    is_dummy: bool = False,
    adapters: Adaptable | None = None,
    groups: Sequence[KVGroup] | None = None,
) -> DecoderModel:
    """Load the model of `config` from this rank's shard of the checkpoint in `folder` to `device` as `dtype`.

    `on_progress` is called after each tensor with the number of tensors read and the number of all. `is_dummy`: random
    weights, and nothing is read. `adapters`: slots of `ops` for adapters, and the modules that adapters may update;
    None: no adapters. `groups`: the layers' KV groups; None: one for all. ConfigError if the checkpoint lacks a tensor,
    has one that is not used or of another shape, or is damaged, or if a size is not a multiple of the number of ranks.
    """
    with open_checkpoint(folder, dtype, device, config.quantization, is_dummy=is_dummy) as checkpoint:
        checkpoint.on_progress = on_progress
        model = read_model(checkpoint, config, max_model_len, ops, group, adapters, groups)
        # Other ranks do not read all biases, and a model on the meta device, for warming up kernels, has few layers.
        if device.type != "meta" and group.rank == 0:
            refuse_surplus(checkpoint, config)
        return model


def read_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_model_len: int,
    ops: Ops,
    group: ParallelGroup,
    adapters: Adaptable | None = None,
    groups: Sequence[KVGroup] | None = None,
) -> DecoderModel:
    """Load the model of `config` from this rank's shard of an open checkpoint, see `load_model`."""
    groups = groups or kv_groups(config, max_model_len, is_grouped=False)
    rotaries = [make_rotary(config, rope, max_model_len, checkpoint.device) for rope in config.ropes]
    names = rooted(config.names, checkpoint)
    adapted = None if adapters is None else AdaptedLayers(*adapters, config.names, names)
    has_head = names.prefers_stored_head and f"{names.head}.weight" in checkpoint
    is_tied = config.tie_word_embeddings and not has_head
    config = msgspec.structs.replace(config, names=names, tie_word_embeddings=is_tied)
    loader = LayerLoader(checkpoint, ops, group, adapted)
    return DecoderModel(loader, config, rotaries, groups, make_position_bias(loader, config, max_model_len))


def refuse_surplus(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ConfigError if the checkpoint has tensors that the model has not read and that its family does not
    ignore."""
    head, pooling = rooted(config.names, checkpoint).head, config.pooling
    tied = [f"{head}."] if config.tie_word_embeddings else []
    of_pooling = head_tensors([] if pooling.head is None else pooling.head.layers)  # read by PoolingLayers
    checkpoint.refuse_unread([*config.names.ignored, *tied, *of_pooling], partial(is_spare, checkpoint))


def rooted(names: TensorNames, checkpoint: Checkpoint) -> TensorNames:
    """Return the names with the prefix that this checkpoint has instead of the family's, such as "model.". Files of a
    model without a head may have none."""
    own = names.embedding.partition(".")[0] + "."
    for root in [*names.roots, ""]:
        embedding = root + names.embedding.removeprefix(own)
        if f"{embedding}.weight" in checkpoint:
            fields = ("embedding", "positions", "token_types", "position_bias", "embedding_norm", "layers", "norm")
            stated = {field: getattr(names, field) for field in fields}
            moved = {field: root + name.removeprefix(own) for field, name in stated.items() if name}
            head = f"{root.removesuffix('model.')}{names.head}"
            head = head if f"{head}.weight" in checkpoint else names.head
            return msgspec.structs.replace(names, head=head, **moved)
    return names
