"""ModelLoader: loads one rank's shard of a checkpoint into a model, with kernels for the rank's device.

It chooses the kernels, and compiles those of a GPU in advance. It keeps no model and no cache: `Worker` owns them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from ..ipc.errors import ConfigError
from ..ipc.process.machine_memory import gib
from ..ipc.spec.config.engine_spec import EngineSpec
from ..ipc.spec.config.speculation import DraftSpec
from ..ipc.spec.drafts.head_config import HeadConfig
from ..ipc.spec.models.model_config import ModelConfig
from ..kernels.byte_cache import CACHE_DTYPES
from ..kernels.select import Ops, select_ops
from .device import device_check
from .features.adapters.adapter_folders import adapter_folders
from .features.adapters.adapter_loader import AdapterLoader
from .features.adapters.slot_filler import SlotFiller, adaptable
from .features.drafting.head_states import STEPS_KEPT, HeadStates
from .features.pooling.pooling_layers import PoolingLayers
from .machine.parallel import NullGroup, ParallelGroup
from .models.decoder import DecoderModel
from .models.load import load_model
from .models.load_head import DraftHead, load_head, moved
from .step.kv_cache import KVCacheSpec
from .step.model_step import Model, StepModel
from .step.profile import StepLimits
from .weights.checkpoint import Checkpoint
from .weights.opening import open_checkpoint

if TYPE_CHECKING:
    from .device.kernel_warmup import KernelWarmup
    from .features.media.media_runner import MediaRunner

logger = logging.getLogger("tokenloom.worker")


class ModelLoader:
    """Loader of one rank's models onto `device`.

    `adapters`: the loader of adapters, which from each load on fills the slots of the new model; None: no adapters.
    """

    def __init__(self, spec: EngineSpec, device: torch.device, adapters: AdapterLoader | None) -> None:
        self._spec = spec
        self._device = device
        self._adapters = adapters
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._cache_dtype = CACHE_DTYPES.get(spec.config.kv_cache_dtype, self._dtype)
        self.spare_folder = Path(spec.run_directory) / "kernels"  # for compiled code, if the cache cannot be written
        self.kernels = ""  # the name of the chosen kernels, for logs and metrics
        self.has_exact_drafts = False  # see Measured

    def load(self, folder: Path, group: ParallelGroup, on_progress: Callable[[int, int], None] | None = None) -> Model:
        """Load the model from this rank's shard of the checkpoint in `folder`.

        `on_progress` is called with the number of tensors read and the number of all, except if transformers reads
        them. ConfigError: bad files, a model that transformers' layers cannot serve, or, with slots for adapters, too
        little memory of a GPU.
        """
        ops = self.select_kernels()
        if self._spec.model.quantization is not None and not (self._has_gpu_kernels or ops.has_integer_products):
            logger.warning(
                "quantized weights take the memory of %s here: --quantized-products integers would keep their codes",
                self._spec.dtype,
            )
        is_reload = folder != Path(self._spec.model_folder)
        is_dummy = self._spec.config.load_format == "dummy" and not is_reload
        if self._spec.model.implementation == "transformers":
            return self._load_borrowed(folder, ops, group, is_dummy=is_dummy)
        self.has_exact_drafts = ops.has_exact_drafts and group.size <= device_check.MAX_DETERMINISTIC_RANKS
        model = self._load_native(folder, self._spec.model, ops, group, self._device, on_progress, is_dummy=is_dummy)
        if self._adapters is not None:
            self._adapters.use(self._new_filler(folder, model, is_dummy=is_dummy))
        return model

    def _load_borrowed(self, folder: Path, ops: Ops, group: ParallelGroup, *, is_dummy: bool) -> Model:
        from .borrowed.load import load_borrowed  # imports transformers

        config, length = self._spec.config, self._spec.max_model_len
        return load_borrowed(
            folder, self._spec.model, config, length, self._dtype, self._device, ops, group, is_dummy=is_dummy
        )

    def _load_native(
        self,
        folder: Path,
        config: ModelConfig,
        ops: Ops,
        group: ParallelGroup,
        device: torch.device,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        is_dummy: bool,
    ) -> DecoderModel:
        adapters = None if self._adapters is None else adaptable(ops, config, self._spec.config)
        try:
            return load_model(
                folder,
                config,
                self._spec.max_model_len,
                self._dtype,
                device,
                ops,
                group,
                on_progress,
                is_dummy=is_dummy,
                adapters=adapters,
                groups=self._spec.kv_groups_of(config),
            )
        except torch.OutOfMemoryError as error:
            if adapters is None:
                raise
            raise ConfigError(
                f"{device} has too little memory for weights and adapters, whose slots take "
                f"{gib(adapters.space.nbytes)} already: lower --max-loras or --max-lora-rank, or give fewer "
                "--lora-target-modules"
            ) from error

    def _new_filler(self, folder: Path, model: DecoderModel, *, is_dummy: bool) -> SlotFiller:
        spec, cpu = self._spec, torch.device("cpu")

        def open_base() -> Checkpoint:
            return open_checkpoint(folder, self._dtype, cpu, spec.model.quantization, is_dummy=is_dummy)

        assert model.adapted is not None
        return SlotFiller(model.adapted, spec.model, spec.config, open_base, adapter_folders(spec))

    def load_media(self, folder: Path, model: Model, group: ParallelGroup) -> MediaRunner | None:
        """Load the encoder of a model that takes media; None for a model of text."""
        if self._spec.model.encoder is None:
            return None
        from .features.media.media_runner import load_media  # imports transformers

        ops = self._select_ops(is_batch_invariant=False)  # a medium has the same rows in any batch
        return load_media(self._spec, folder, self._dtype, self._device, group, model, ops)

    def load_draft(self, group: ParallelGroup, target: Model, folder: Path) -> StepModel | None:
        """Load the draft model or head; None if there is none. target: the engine's model, which a head reads; folder:
        that of its checkpoint."""
        draft = self._spec.draft
        if draft is None:
            return None
        if draft.head is not None:
            return self._load_head(moved(draft, folder), draft.head, group, target)
        config = msgspec.structs.replace(self._spec.config, enable_lora=False)
        spec = msgspec.structs.replace(
            self._spec,
            config=config,
            model=draft.model,
            model_folder=draft.folder,
            has_integer_products=draft.has_integer_products,
        )
        return ModelLoader(spec, self._device, None).load(Path(draft.folder), group)

    def _load_head(self, draft: DraftSpec, head: HeadConfig, group: ParallelGroup, target: Model) -> DraftHead:
        assert isinstance(target, DecoderModel), "heads are of models with native layers"
        ops = self._select_ops(is_batch_invariant=self._spec.config.deterministic)
        return load_head(draft, head, target, self._spec.max_model_len, self._dtype, self._device, ops, group)

    def new_head_states(self, draft: StepModel) -> HeadStates | None:
        """Return room for the hidden states that the draft head reads; None for a draft model."""
        spec = self._spec
        if not isinstance(draft, DraftHead) or spec.draft is None or spec.draft.head is None:
            return None
        return HeadStates(
            spec.draft.head,
            draft.fuse,
            self._num_kept_states,
            spec.config.max_num_seqs,
            spec.max_model_len + 1,
            self._dtype,
            self._device,
        )

    @property
    def head_states_bytes(self) -> int:
        """Memory of the hidden states that are kept for the draft head."""
        draft = self._spec.draft
        if draft is None or draft.head is None:
            return 0
        return self._num_kept_states * draft.head.num_inputs * self._dtype.itemsize

    @property
    def _num_kept_states(self) -> int:
        return STEPS_KEPT * self._spec.max_num_batched_tokens

    def load_pooling(self, folder: Path, group: ParallelGroup) -> PoolingLayers | None:
        """Load the layers that make vectors and scores of hidden states; None on ranks that return no results."""
        if group.rank != 0:
            return None
        is_dummy = self._spec.config.load_format == "dummy" and folder == Path(self._spec.model_folder)
        open_folder = partial(
            open_checkpoint, dtype=torch.float32, device=self._device, quantization=None, is_dummy=is_dummy
        )
        is_batch_invariant = self._spec.config.deterministic
        return PoolingLayers.load(folder, self._spec.model, open_folder, is_batch_invariant=is_batch_invariant)

    def kv_cache_specs(self, model: StepModel) -> Sequence[KVCacheSpec]:
        """Return the shape of each KV group of the model, in the dtype that the options name."""
        return model.kv_cache_specs(self._spec.config.block_size, self._cache_dtype)

    # ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────

    def select_kernels(self) -> Ops:
        """Choose the kernels for the model, and note their name."""
        ops = self._select_ops(is_batch_invariant=self._spec.config.deterministic)
        self.kernels = ops.kernels
        return ops

    def _select_ops(self, *, is_batch_invariant: bool) -> Ops:
        config = self._spec.config
        return select_ops(
            self._device,
            self._dtype,
            enforce_reference=config.enforce_reference,
            is_batch_invariant=is_batch_invariant,
            spare_folder=self.spare_folder,
            cpu_isa=config.cpu_isa,
            has_integer_products=self._spec.has_integer_products,
        )

    @property
    def has_device_kernels(self) -> bool:
        """Whether the device is a GPU with kernels for the model, not --enforce-reference."""
        return self._has_gpu_kernels and self._fits_gpu_kernels

    @property
    def samples_on_device(self) -> bool:
        """Whether steps can sample on the device: it has kernels, and no layer keeps a state in the KV cache, whose
        blocks the host chooses for each step. Nothing is sampled of an encoder."""
        model = self._spec.model
        return self.has_device_kernels and model.state is None and not model.is_encoder

    @property
    def has_graphs(self) -> bool:
        return self.samples_on_device and not self._spec.config.enforce_eager

    @property
    def _has_gpu_kernels(self) -> bool:
        return self._device.type == "cuda" and not self._spec.config.enforce_reference

    @cached_property
    def _fits_gpu_kernels(self) -> bool:
        """Whether this GPU has kernels for all layers of the model, which are launched without transformers."""
        if self._spec.model.implementation == "transformers":
            return False
        from ..kernels.gpu.load import load_gpu_ops

        ops = load_gpu_ops(self._device)
        model = self._spec.model
        if isinstance(ops, str):
            return False
        layers = [model.at_layer(layer) for layer in range(model.num_layers)]
        return all(ops.supports(each.head_dim, each.num_heads // each.num_kv_heads) for each in layers)

    def start_warmup(self, rank: int) -> KernelWarmup:
        """Start threads that compile the kernels of the model."""
        from .device.kernel_warmup import META_DEVICE, KernelWarmup, distinct_layers, launch_steps

        def launch() -> None:
            spec, group = self._spec, NullGroup(rank, self._spec.config.tensor_parallel_size)
            layers = distinct_layers(spec.model)
            is_dummy = spec.config.load_format == "dummy"
            ops = self.select_kernels()
            model = self._load_native(Path(spec.model_folder), layers, ops, group, META_DEVICE, is_dummy=is_dummy)
            launch_steps(
                model,
                [spec.allocate(1, META_DEVICE) for spec in self.kv_cache_specs(model)],
                StepLimits.of(spec),
                group,
                self.has_graphs,
                spec.config.enable_lora,
                has_shifts=spec.model.cross is not None or any(rope.sections for rope in spec.model.ropes),
                has_spans=spec.model.encoder is not None and spec.model.encoder.is_bidirectional,
            )

        return KernelWarmup(launch, self._device)
