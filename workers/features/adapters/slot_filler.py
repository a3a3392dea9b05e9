"""SlotFiller: fills slots of one loaded model with adapters from the engine's store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ....ipc.errors import ConfigError, RequestError
from ....ipc.messages.adapter import FillSlot
from ....ipc.process.pacer import Pause, no_pause
from ....ipc.spec.adapters.adapter_file import AdapterReader
from ....ipc.spec.adapters.digest import adapter_digest
from ....ipc.spec.adapters.targets import is_chosen, targets_of
from ....ipc.spec.config.engine_config import EngineConfig
from ....ipc.spec.models.model_config import ModelConfig
from ....kernels.select import Ops
from ...weights.adapted_layers import Adaptable, AdaptedLayers
from ...weights.checkpoint import Checkpoint
from .adapter_folders import AdapterFolders, StoredAdapters
from .adapter_weights import AdapterWeights
from .base_weights import PIECE_BYTES, BaseWeights
from .tensor_buffer import TensorBuffer


def adaptable(ops: Ops, model: ModelConfig, config: EngineConfig) -> Adaptable:
    """Return empty slots for a model that is about to be packed by `ops`. ConfigError if no module gets any."""
    chosen = config.lora_target_modules
    modules = frozenset(path for path, target in targets_of(model).items() if is_chosen(target, chosen))
    if not modules:
        raise ConfigError(
            f"--lora-target-modules {' '.join(chosen or ())} names no module of {model.architecture}: leave it out"
        )
    return Adaptable(ops.adapter_space(config.max_loras, config.max_lora_rank), modules)


class SlotFiller:
    """Owner of the digests of the adapters that it has checked, and of the memory to read adapters. One thread at a
    time may use it. The first read of an adapter bypasses the page cache, because few of many are read again."""

    def __init__(
        self,
        adapted: AdaptedLayers,
        model: ModelConfig,
        config: EngineConfig,
        open_base: Callable[[], Checkpoint],
        folders: AdapterFolders | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """folders: finds the folders of adapters; default: in the engine's store. open_base, piece_bytes: arguments of
        BaseWeights."""
        self._folders = folders or StoredAdapters()
        self.adapted = adapted
        self._reader = AdapterReader(model, max_rank=config.max_lora_rank, target_modules=config.lora_target_modules)
        self._open_base = partial(BaseWeights, open_base, piece_bytes)
        self._checked: set[bytes] = set()
        self._buffer = TensorBuffer()

    def fill(self, order: FillSlot, pause: Pause = no_pause) -> int:
        """Fill a slot, in every layer, and return the bytes read; in a layer that the adapter does not update, the slot
        becomes empty. RequestError if the folder holds another adapter than ordered, or one that does not fit. `pause`
        is called between pieces of the work."""
        with self._folders.open(order, pause) as folder:
            return self._fill(order, folder, pause)

    def _fill(self, order: FillSlot, folder: Path, pause: Pause) -> int:
        is_new = order.digest not in self._checked
        if is_new and adapter_digest(folder, pause, self._buffer.pages) != order.digest:
            raise RequestError(f"{folder} has changed since it was stored: load the adapter again from its own folder")
        file = self._reader.read(folder, pause)
        weights = AdapterWeights(file, base := self._open_base(), self._buffer, is_direct=is_new)
        with base, weights:
            if is_new:
                for layer in self.adapted.linears:
                    weights.check_copies(layer)
                    pause()
                self._checked.add(order.digest)
            for layer in sorted(self.adapted.linears, key=weights.offset_of):
                layer.slots.fill(order.slot, weights.update_of(layer))
                pause()
            for experts in self.adapted.experts:
                experts.slots.fill(order.slot, *weights.updates_of(experts))
                pause()
            self.adapted.space.wait_for_fills()
            return weights.num_bytes

    def empty(self, slot: int) -> None:
        """Free the memory of a slot whose fill failed."""
        for layer in self.adapted.linears:
            layer.slots.fill(slot, None)
        for experts in self.adapted.experts:
            experts.slots.fill(slot, [], [])
        self.adapted.space.wait_for_fills()
