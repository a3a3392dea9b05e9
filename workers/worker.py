"""Worker: one rank of the engine, from a checkpoint to a ModelRunner.

    load → measure → initialize → steps of `runner` … → hold → steps …

Each stage is one call, so that a worker runs in its own process (`process.py`) or in the caller's. Owns the shard of
the weights, the KV cache and the runner; knows no socket.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..ipc.kv.pool_shape import PoolShape
from ..ipc.messages.base import Holding, MemoryTag, Rank
from ..ipc.messages.supervisor import Measured, Phase
from ..ipc.process.arena import Arena
from ..ipc.process.faults import maybe_fail
from ..ipc.process.machine_memory import available_bytes, gib
from ..ipc.process.malloc import trim_heap
from ..ipc.process.page_supply import PageRange, PageSupply
from ..ipc.spec.config.engine_spec import EngineSpec
from .activations import measure_activations
from .device import device_check
from .features.adapters.adapter_loader import AdapterLoader
from .features.drafting.drafter import Drafter
from .features.kv_copies.kv_copies import pin_arena
from .features.new import new_features
from .features.pooling.pooling_layers import PoolingLayers
from .machine.cpu_threads import num_cpu_threads
from .machine.memory import KVCacheLimits, check_adapters, fit_on_cpu, fit_on_gpu
from .machine.parallel import ParallelGroup
from .machine.rendezvous import LocalRendezvous, Rendezvous
from .machine.trace_recorder import TraceRecorder
from .model_loader import ModelLoader
from .model_runner import ModelRunner
from .sampling.logits_processors import load_processors
from .sampling.row_processors import CustomLogitsProcessor
from .sampling.sampler import Sampler, select_sampler
from .step.input_batch import InputBatch
from .step.kv_cache import KVCacheSpec, KVPool, block_bytes_of
from .step.model_step import Model, StepModel
from .step.profile import dummy_step, run_dummy
from .weights.readahead import drop_pages

if TYPE_CHECKING:
    from .features.media.media_runner import MediaRunner

logger = logging.getLogger("tokenloom.worker")

COMPILE_SHARE = 0.8  # of the start timeout, so that a hanging compiler is named before the supervisor gives up
MAX_BYTES = 2**63 - 1  # more than any pool has
AHEAD_BYTES = 256 << 20  # of the pool, taken beyond the highest block that was used; with KV tiers it is the longest
# request, if that is more: its blocks may come faster than the kernel finds pages for them


class Worker:
    """Rank `rank` of worker group `generation`. All ranks of a group must get the same calls in the same order."""

    def __init__(
        self,
        spec: EngineSpec,
        rank: int,
        generation: int,
        ahead_bytes: int = AHEAD_BYTES,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """available: returns the free memory of the machine in bytes."""
        self._spec, self._ahead_bytes, self._available = spec, ahead_bytes, available
        self._rank, self._size = rank, spec.config.tensor_parallel_size
        self._local_ranks = [each.tp for each in spec.ranks_on(spec.host_of(Rank(0, rank)))]
        self._num_local_workers = len(spec.local_workers(Rank(0, rank)))
        index = spec.local_number(Rank(0, rank))
        self._device = torch.device("cuda", index) if spec.device == "cuda" else torch.device("cpu")
        self.rendezvous: Rendezvous = LocalRendezvous(spec.own_file(f"group-{generation}"))
        self._group = ParallelGroup(rank, self._size)
        self._sampler: Sampler | None = None  # only on rank 0
        self._folder = Path(spec.model_folder)
        self._asleep: list[MemoryTag] = []  # memory that is not held
        self._pool_shape: PoolShape | None = None  # from initialize on
        self._arena: Arena | None = None  # from initialize on, if there are KV tiers
        self._loaded_bytes = 0  # of the blocks that the longest row may get from these
        self._model: Model | None = None
        self._draft: StepModel | None = None  # with the model, if it is given
        self._media: MediaRunner | None = None  # with the model, if it takes media
        self._pooling: PoolingLayers | None = None  # with the model, on rank 0
        self._kv_pool: KVPool | None = None
        self._pool_pages: PageRange | None = None  # of the KV cache, on a CPU
        self._page_supply: PageSupply | None = None  # with them
        self.runner: ModelRunner | None = None  # None while weights or KV cache are asleep
        self.on_progress: Callable[[int, int], None] | None = None  # gets (tensors read, all tensors)
        self._max_loras = spec.config.max_loras if spec.config.enable_lora else 0
        self.adapters = AdapterLoader(Rank(0, rank), self._max_loras) if self._max_loras else None  # fills slots
        self._loader = ModelLoader(spec, self._device, self.adapters)
        self._processors: list[CustomLogitsProcessor] = []
        self.recorder = TraceRecorder(spec.profile_folder, spec.own_file(f"rank-{rank}").name, self._device)

    def load(self, folder: Path | None = None, asleep: Sequence[MemoryTag] = ()) -> Iterator[Phase]:
        """Check the device, join the group, read the weights from `folder` (default: the spec's) and compile kernels.

        Yields each phase when it ends. Memory in `asleep` stays empty until `hold`. ConfigError: bad files or options.
        """
        begun = time.monotonic()
        self._folder, self._asleep = folder or self._folder, list(asleep)
        maybe_fail("worker.load", self._rank)
        self._processors = load_processors(self._spec.config.allowed_logits_processors)
        self._prepare_device()
        if self._size > 1:
            timeout_s = self._spec.config.start_timeout_s
            self._group = ParallelGroup.connect(self._rank, self._size, self._device, self.rendezvous, timeout_s)
            yield Phase(name="join group", duration_s=time.monotonic() - begun, detail=f"{self._size} ranks")
            begun = time.monotonic()
        if self._rank == 0:
            config = self._spec.config
            self._sampler = select_sampler(
                self._device, config.enforce_reference, self._loader.spare_folder, config.cpu_isa
            )
        if "weights" in asleep:
            self._loader.select_kernels()
            return
        ahead = self._loader.start_warmup(self._rank) if self._loader.samples_on_device else None
        self._model = self._load_model()
        size = gib(self._model.weight_bytes)
        detail = f"{size} as {self._spec.dtype} on {self._device}, {self._loader.kernels}"
        yield Phase(name="load weights", duration_s=time.monotonic() - begun, detail=detail)
        self._pooling = self._loader.load_pooling(self._folder, self._group)
        begun, self._draft = time.monotonic(), self._loader.load_draft(self._group, self._model, self._folder)
        if self._draft is not None:
            detail = gib(self._draft.weight_bytes)
            yield Phase(name="load draft model", duration_s=time.monotonic() - begun, detail=detail)
        begun, self._media = time.monotonic(), self._load_media(self._model)
        if self._media is not None:
            yield Phase(name="load encoder", duration_s=time.monotonic() - begun, detail=gib(self._media.weight_bytes))
        if ahead is not None:
            begun = time.monotonic()
            ahead.wait(COMPILE_SHARE * self._spec.config.start_timeout_s)
            detail = f"{ahead.num_kernels} in {ahead.duration_s:.1f} s, beside the weights"
            yield Phase(name="compile kernels", duration_s=time.monotonic() - begun, detail=detail)

    def measure(self) -> Measured:
        """Measure how much memory the KV pool gets; on a GPU this runs the largest steps. ConfigError if too little. If
        memory is asleep, measure nothing and return MAX_BYTES."""
        if self._asleep:  # it replaces a worker of an engine that has its pool's size
            return Measured(
                pool_bytes=MAX_BYTES, block_bytes=(), device=str(self._device), kernels=self._loader.kernels
            )
        assert self._model is not None, "load comes first"
        limits = KVCacheLimits(
            block_bytes=block_bytes_of(
                self._loader.kv_cache_specs(self._model), self._model.state_spec, self._draft_specs
            ),
            blocks_per_row=self._spec.num_held(self._spec.max_model_len),
            max_num_seqs=self._spec.config.max_num_seqs,
            num_blocks=self._num_kv_blocks,
            num_bytes=self._spec.config.kv_cache_memory_bytes,
        )
        for_media = 0 if self._media is None else self._media.reserved_bytes
        taken = self._model.state_bytes * self._spec.config.max_num_seqs + self._adapter_bytes + for_media
        taken += self._loader.head_states_bytes
        if self._device.type == "cpu":
            config = self._spec.config
            available = self._available()
            free_bytes = available // self._num_local_workers
            check_adapters(self._adapter_bytes, free_bytes, config.max_loras, config.max_lora_rank)
            pool_bytes = fit_on_cpu(limits, available - taken * self._num_local_workers, self._num_local_workers)
        else:
            utilization = self._spec.config.gpu_memory_utilization
            taken += measure_activations(self._spec, self._loader, self._model, self._sampler, self._device)
            pool_bytes = fit_on_gpu(limits, self._device, taken, utilization)
        return Measured(
            pool_bytes=pool_bytes,
            block_bytes=tuple(limits.block_bytes),
            device=device_check.describe_device(self._device),
            kernels=self._loader.kernels,
            has_exact_drafts=self._loader.has_exact_drafts,
            free_bytes=self._available() * len(self._local_ranks) // self._num_local_workers,
        )

    def initialize(self, pool: PoolShape, arena: Arena | None = None) -> None:
        """Allocate the KV pool, run one token so that the first request does not pay for lazy set-up, and make the
        runner. If weights or KV cache are asleep, only store the arguments. The `arena` of KV tiers is pinned for a
        GPU."""
        self._pool_shape = pool
        if arena is not None and self._arena is None and self._device.type == "cuda":
            pin_arena(arena)
        self._arena = arena
        if arena is not None:
            num_blocks, size = self._spec.max_blocks_per_row, self._spec.config.block_size
            groups = zip(self._spec.kv_groups, pool.block_bytes, strict=True)
            self._loaded_bytes = sum(group.num_needed(num_blocks, size) * each for group, each in groups)
        if self._model is None or "kv_cache" in self._asleep:
            return
        specs, states = self._loader.kv_cache_specs(self._model), self._model.state_spec
        self._kv_pool = KVPool(specs, pool, self._device, states, self._draft_specs)
        has_states = states is not None
        is_encoder = self._spec.model.is_encoder
        step = dummy_step(
            [1], [1], self._spec.config.block_size, len(specs), has_states=has_states, is_encoder=is_encoder
        )
        run_dummy(self._model, step, self._kv_pool.caches, self._sampler, states=self._kv_pool.states)
        self.runner = self._make_runner(self._model, self._kv_pool)
        if self._device.type == "cpu":
            self._pool_pages = PageRange(self._kv_pool.buffer.numpy().data, 0)
            of_arena = [] if arena is None else [PageRange(arena.memory, arena.shape.num_bytes, is_shared=True)]
            self._page_supply = PageSupply([*of_arena, self._pool_pages])

    @property
    def page_supply(self) -> PageSupply | None:
        """The pages to take while nothing else is to be done: the arena of KV tiers, and those of the pool beyond the
        blocks in use. None on a GPU or without a KV cache."""
        if self._pool_pages is not None and self._kv_pool is not None and self.runner is not None:
            block_bytes = self._kv_pool.block_bytes
            highest = zip(self.runner.highest_blocks, block_bytes, strict=True)
            used_bytes = max((block + 1) * size for block, size in highest)
            self._pool_pages.want(used_bytes + max(self._ahead_bytes, self._loaded_bytes))
        return self._page_supply

    def _make_runner(self, model: Model, pool: KVPool) -> ModelRunner:
        config = self._spec.config
        max_model_len = self._spec.max_model_len
        batch = InputBatch(
            config.max_num_seqs,
            max_model_len,
            config.block_size,
            num_blocks=[len(cache) for cache in pool.caches],
            windows=[group.window for group in self._spec.kv_groups if not group.is_state],
            num_state_blocks=0 if pool.states is None else len(pool.states.conv[0]),
            vocab_size=self._spec.model.vocab_size,
            processors=self._processors,
            max_loras=self._max_loras,
            rules=self._spec.model.output_rules,
            is_encoder=self._spec.model.is_encoder,
        )
        device_runner = None
        if self._loader.samples_on_device:
            from .device.cuda_graphs import CudaRecorder
            from .device.device_runner import DeviceRunner

            recorder = CudaRecorder() if self._loader.has_graphs else None
            device_runner = DeviceRunner(
                model,
                pool.caches,
                config.max_num_seqs,
                max_model_len,
                self._group,
                recorder,
                has_adapters=config.enable_lora,
                shifts=None if self._media is None else self._media.shifts,
            )
        drafter = None
        if self._draft is not None:
            num_groups, most_tokens = len(pool.blocks), self._spec.max_num_batched_tokens
            drafter = Drafter(
                self._draft,
                pool.draft_caches,
                batch,
                self._group,
                self._sampler,
                num_groups,
                most_tokens,
                self._loader.new_head_states(self._draft),
            )
        return ModelRunner(
            model,
            batch,
            pool.caches,
            self._group,
            pool.states,
            device_runner=device_runner,
            sampler=self._sampler,
            trace=self.recorder.step,
            features=new_features(
                batch,
                pool.blocks,
                self._group,
                self._arena,
                self._local_ranks,
                self._media,
                self.adapters,
                self._pooling,
                drafter,
                has_token_types=self._spec.model.num_token_types > 1,
            ),
        )

    @property
    def _draft_specs(self) -> Sequence[KVCacheSpec]:
        """The KV groups of the draft model."""
        return () if self._draft is None else self._loader.kv_cache_specs(self._draft)

    def _load_model(self) -> Model:
        return self._loader.load(self._folder, self._group, self.on_progress)

    def _load_media(self, model: Model) -> MediaRunner | None:
        return self._loader.load_media(self._folder, model, self._group)

    @property
    def _num_kv_blocks(self) -> int | None:
        """The number of blocks of the KV pool, the null block included; None: what memory allows."""
        if self._spec.model.is_encoder:
            return 1 + self._spec.max_step_blocks
        return self._spec.config.num_kv_blocks

    @property
    def _adapter_bytes(self) -> int:
        """Memory that slots for adapters will take; the kernels of a GPU have allocated it already."""
        return 0 if self.adapters is None or self._loader.has_device_kernels else self.adapters.num_bytes

    def hold(self, holding: Holding) -> None:
        """Forget all rows, free the parts in `holding.asleep`, then load or allocate every other part that is missing.
        New weights replace the old ones, which are freed first. The worker is unusable after an error."""
        assert self._pool_shape is not None, "initialize comes before hold"
        self._forget_rows()
        self._asleep = holding.asleep
        self.runner = None
        if holding.model_folder or "weights" in holding.asleep:
            self._model = self._media = self._pooling = self._draft = None
            if self.adapters is not None:
                self.adapters.use(None)
        if "kv_cache" in holding.asleep:
            self._kv_pool = self._pool_pages = self._page_supply = None
        self._give_back()
        if holding.drops_pages:
            drop_pages(self._folder)
        self._folder = Path(holding.model_folder or self._folder)
        if self._model is None and "weights" not in holding.asleep:
            self._model = self._load_model()
            self._pooling = self._loader.load_pooling(self._folder, self._group)
            self._media = self._load_media(self._model)
            self._draft = self._loader.load_draft(self._group, self._model, self._folder)
        if self._kv_pool is None:
            self.initialize(self._pool_shape, self._arena)
        elif self._model is not None:
            self.runner = self._make_runner(self._model, self._kv_pool)

    def _give_back(self) -> None:
        """Collect garbage and, if a part is asleep, return free memory to the machine."""
        gc.collect()  # recorded graphs refer to themselves and hold the weights
        if self._device.type == "cuda" and self._asleep:
            torch.cuda.empty_cache()
        elif self._asleep:
            trim_heap()

    def reset(self) -> None:
        """Finish the started steps, drop their results, forget all rows and open orders, for a new core."""
        self._forget_rows()
        if self.adapters is not None:
            self.adapters.forget_orders()

    def _forget_rows(self) -> None:
        if self.runner is not None:
            self.runner.clear()

    def close(self) -> None:
        """Leave the tensor-parallel group; a group of GPUs is left when the process ends."""
        self._group.close()

    def _prepare_device(self) -> None:
        """Check the options, then set torch's CPU threads or select the GPU. ConfigError if the device does not fit."""
        device_check.check_options(self._spec, self._size)
        if self._device.type == "cpu":
            device_check.check_cpu(self._spec)
            torch.set_num_threads(num_cpu_threads(self._spec.config.num_threads, self._num_local_workers))
        else:
            device_check.select_gpu(self._device)
            device_check.check_gpu(self._spec, self._device, has_kernels=self._loader.has_device_kernels)
