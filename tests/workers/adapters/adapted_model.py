"""Models with slots for adapters, for the tests of this folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tokenloom.ipc.adapters.digest import adapter_digest
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.config.served_model import quantized_on_load
from tokenloom.ipc.messages.adapter import FillSlot
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.workers.adapters.slot_filler import SlotFiller, adaptable
from tokenloom.workers.models.decoder import DecoderModel, load_model
from tokenloom.workers.parallel import ParallelGroup
from tokenloom.workers.weights.checkpoint import Checkpoint

CONFIG = EngineConfig(enable_lora=True, max_loras=5, max_lora_rank=16)


def load_adaptable(
    folder: Path,
    ops: Ops | None = None,
    group: ParallelGroup | None = None,
    config: EngineConfig = CONFIG,
    quantization: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[DecoderModel, SlotFiller]:
    """Load a model with empty slots, and their filler."""
    model_config = load_model_config(folder)
    if quantization is not None:
        model_config = quantized_on_load(model_config, quantization)
    ops = ops or select_ops(CPU, dtype)
    adapters = adaptable(ops, model_config, config)
    model = load_model(folder, model_config, 128, dtype, CPU, ops, group or ParallelGroup(), adapters=adapters)
    assert model.adapted is not None
    open_base = partial(Checkpoint, folder, dtype, CPU, model_config.quantization)
    return model, SlotFiller(model.adapted, model_config, config, open_base)


def fill(filler: SlotFiller, slot: int, folder: Path) -> None:
    filler.fill(FillSlot(slot=slot, digest=adapter_digest(folder), folder=str(folder)))
