"""Models with slots for adapters, for the tests of this folder."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import torch

from tokenloom.ipc.messages.adapter import FillSlot
from tokenloom.ipc.process.pacer import Pause
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import quantized_on_load
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.support.waiting import WAIT_S
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.workers.features.adapters.base_weights import PIECE_BYTES
from tokenloom.workers.features.adapters.slot_filler import SlotFiller, adaptable
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.weights.checkpoint import Checkpoint

CONFIG = EngineConfig(enable_lora=True, max_loras=5, max_lora_rank=16)


def load_adaptable(
    folder: Path,
    ops: Ops | None = None,
    group: ParallelGroup | None = None,
    config: EngineConfig = CONFIG,
    quantization: str | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[DecoderModel, SlotFiller]:
    """Load a model with empty slots, and their filler."""
    model_config = load_model_config(folder)
    if quantization is not None:
        model_config = quantized_on_load(model_config, quantization)
    ops = ops or select_ops(CPU, torch.float32)
    adapters = adaptable(ops, model_config, config)
    model = load_model(folder, model_config, 128, torch.float32, CPU, ops, group or ParallelGroup(), adapters=adapters)
    assert model.adapted is not None
    open_base = partial(Checkpoint, folder, torch.float32, CPU, model_config.quantization)
    return model, SlotFiller(model.adapted, model_config, config, open_base, piece_bytes=piece_bytes)


def fill(filler: SlotFiller, slot: int, folder: Path) -> None:
    filler.fill(FillSlot(slot=slot, digest=adapter_digest(folder), folder=str(folder)))


class GatedFiller:
    """In place of a SlotFiller, or before one: the next fill waits while the gate is closed, or raises an error."""

    def __init__(self, filler: SlotFiller | None = None) -> None:
        self._filler, self._gate, self._has_begun = filler, threading.Semaphore(0), threading.Semaphore(0)
        self._is_closed, self.errors = False, list[Exception]()
        self.num_threads = 0  # that the last fill computed with

    def close(self) -> None:
        self._is_closed = True

    def wait_for_fill(self) -> None:
        """Wait until a fill stands before the gate."""
        assert self._has_begun.acquire(timeout=WAIT_S * 10)

    def open(self) -> None:
        self._is_closed = False
        self._gate.release()

    def fill(self, order: FillSlot, pause: Pause) -> int:
        self.num_threads = torch.get_num_threads()
        if self.errors:
            raise self.errors.pop()
        if self._is_closed:
            self._has_begun.release()
            assert self._gate.acquire(timeout=WAIT_S * 10)
        return 0 if self._filler is None else self._filler.fill(order, pause)

    def empty(self, slot: int) -> None:
        if self._filler is not None:
            self._filler.empty(slot)
