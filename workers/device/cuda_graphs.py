"""DecodeGraphs: decode steps, model and sampling, as one CUDA graph per padded batch size.

    rows → begin_decode → layers → logits → sample → last tokens of the rows
           └──────────────── one graph ────────────────┘

Common sizes are captured at the start, any other size when it occurs for the second time; until then the same kernels
run one by one. Steps that the host samples have graphs that end with the logits; none of these are captured at the
start. Steps with adapters have separate graphs, so that other steps spend no time on adapters. A graph fits any rows,
because lengths, tokens, parameters and adapter slots are read on the device (DeviceBatch). NCCL collectives are part of
the graph, so all ranks capture the same sizes at the same steps. The largest size is captured first, so that smaller
graphs reuse its memory.

Only the capture itself needs a GPU; tests use a fake `Recorder`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...kernels.contract import AttentionMetadata, CacheGroup
from ..machine.arrays import I32, I64
from ..step.model_step import Model, StepContext
from .device_batch import DeviceBatch

SIZES_AT_START = (8, 4, 2, 1)  # sizes that are captured at the start, after the largest
NODE_BYTES = 10 << 10  # driver memory for each kernel of a graph (NVIDIA/cccl pull request 3768)
NODES_PER_LAYER = 16  # the most kernels of a layer without experts: a matrix product may be two kernels
ADAPTER_NODES_PER_LAYER = 8  # shrink and expand of four products
CUBLAS_BYTES = 32 << 20  # cuBLAS workspace of the capturing stream on Hopper

Step: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Step], Step]  # captures a step; the result replays its launches on the same memory


class CudaRecorder:
    """Recorder of CUDA graphs. They share one memory pool, because only one runs at a time.

    The pool is freed with its last graph, so new weights need a new recorder.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Capture `step` and return its replay. It must have run before: compilation and lasting allocations cannot be
        captured."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be waiting for the tokens of the previous step.
        with gc_paused(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: freeing a kernel or graph would invalidate the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def padded_size(num_rows: int, max_size: int) -> int:
    """Return `num_rows` rounded up to a graph size: by at most 3 rows or an eighth, and to `max_size` at most."""
    if num_rows <= 2:
        return num_rows
    grain = max(4, 1 << max((num_rows - 1).bit_length() - 4, 0))
    return min(-(-num_rows // grain) * grain, max_size)


def graph_bytes(
    max_num_seqs: int,
    vocab_size: int,
    num_heads: int,
    head_dim: int,
    num_layers: int,
    max_blocks_per_row: int,
    num_ranks: int,
    num_groups: int = 1,
    has_adapters: bool = False,
) -> int:
    """Estimate the bytes of all graphs, for a model without experts.

    The estimate contains the pool, the logits for the host, block tables of every size, and the kernels of two graphs
    per size, with and without sampling, and of two more with adapters. The pool is as large as the largest graph needs:
    cuBLAS workspace, logits in two precisions and gathered from ranks, candidates, and partial attention.
    """
    logits_bytes = vocab_size * (16 if num_ranks == 1 else 24)
    pool = CUBLAS_BYTES + max_num_seqs * (logits_bytes + 16 * 4 * num_heads * (head_dim + 1) + (256 << 10))
    sizes = {padded_size(num_rows, max_num_seqs) for num_rows in range(1, max_num_seqs + 1)}
    num_nodes = NODES_PER_LAYER + has_adapters * (NODES_PER_LAYER + ADAPTER_NODES_PER_LAYER)
    return (
        pool + sum(sizes) * num_groups * max_blocks_per_row * 4 + 2 * len(sizes) * num_layers * num_nodes * NODE_BYTES
    )


class _Buffers:
    """The inputs and outputs of the graphs of one size."""

    def __init__(self, size: int, num_groups: int, max_blocks_per_row: int, device: torch.device) -> None:
        def int64() -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.rows = b""  # the rows in row_ids, as bytes of int32
        self.row_ids = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.positions, self.sampled = int64(), int64()
        shape = (size, max_blocks_per_row)
        self.slots = [int64() for _ in range(num_groups)]
        self.block_tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self.seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def groups(self, kv_caches: Sequence[Tensor], max_model_len: int) -> list[CacheGroup]:
        """Return the caches with new metadata objects for a step: kernels cache derived data by their identity."""
        size = len(self.row_ids)
        starts, lengths = list(range(size + 1)), [max_model_len] * size  # the host knows only a bound
        return [
            CacheGroup(
                kv_cache,
                AttentionMetadata(
                    positions=self.positions,
                    slots=slots,
                    query_starts=self.query_starts,
                    seq_lens=self.seq_lens,
                    block_tables=block_tables,
                    num_decode_rows=size,
                    query_starts_host=starts,
                    seq_lens_host=lengths,
                ),
            )
            for kv_cache, slots, block_tables in zip(kv_caches, self.slots, self.block_tables, strict=True)
        ]


class _Kind(NamedTuple):
    """Key of a graph: the kind of step that it computes."""

    size: int
    is_sampled: bool
    has_adapters: bool


class DecodeGraphs:
    """Runner of decode steps, by graph if it is captured. Owns the buffers and graphs of each size; the constructor
    captures those of `sizes_at_start` and `max_num_seqs`."""

    def __init__(
        self,
        model: Model,
        kv_caches: Sequence[Tensor],
        rows: DeviceBatch,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder,
        sizes_at_start: tuple[int, ...] = SIZES_AT_START,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._rows = rows
        self._recorder = recorder
        self._buffers: dict[int, _Buffers] = {}
        self._logits: Tensor | None = None  # [max_num_seqs, vocab] float32; None until first used
        self._seen: set[_Kind] = set()
        self._replays: dict[_Kind, Step] = {}
        self._record_at_start((max_num_seqs, *(size for size in sizes_at_start if size < max_num_seqs)))

    @torch.inference_mode()
    def _record_at_start(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            for has_adapters in (True, False) if self._rows.has_adapters else (False,):  # the larger graph first
                kind = _Kind(size, True, has_adapters)
                self._compute(self._buffers_of(size), kind)  # all rows are padding
                self._record(kind)

    def unknown_row_ids(self, rows: I32) -> I64 | None:
        """Return the row ids [size], −1 = padding, for `run`; None if the last step of this size had the same rows."""
        size = padded_size(len(rows), self._max_num_seqs)
        if size in self._buffers and self._buffers[size].rows == rows.tobytes():
            return None
        row_ids = np.full(size, -1, np.int64)
        row_ids[: len(rows)] = rows
        return row_ids

    def run(self, rows: I32, row_ids: Tensor | None, has_adapters: bool = False) -> Tensor:
        """Launch a decode step of rows [n]; return their tokens [n] int64 on the device, which the next step of the
        same size overwrites.

        row_ids: `unknown_row_ids` of the rows, copied to the device. `has_adapters`: whether any row has an adapter.
        """
        return self._run(rows, row_ids, True, has_adapters).sampled[: len(rows)]

    def run_to_logits(self, rows: I32, row_ids: Tensor | None, has_adapters: bool = False) -> Tensor:
        """Launch a decode step without sampling, with the arguments of `run`; return logits, which the next such step
        overwrites: [n, vocab] float32 on rank 0, [0, vocab] on the other ranks."""
        self._run(rows, row_ids, False, has_adapters)
        assert self._logits is not None
        return self._logits[: len(rows)]

    def _run(self, rows: I32, row_ids: Tensor | None, is_sampled: bool, has_adapters: bool) -> _Buffers:
        kind = _Kind(padded_size(len(rows), self._max_num_seqs), is_sampled, has_adapters)
        buffers = self._buffers_of(kind.size)
        if kind in self._seen and kind not in self._replays:
            self._record(kind)
        self._seen.add(kind)
        if row_ids is not None:
            buffers.row_ids.copy_(row_ids)
            buffers.rows = rows.tobytes()
        if kind in self._replays:
            self._replays[kind]()
        else:
            self._compute(buffers, kind)
        return buffers

    def _buffers_of(self, size: int) -> _Buffers:
        if size not in self._buffers:
            num_groups, _, max_blocks_per_row = self._rows.columns.block_tables.shape
            self._buffers[size] = _Buffers(size, num_groups, max_blocks_per_row, self._kv_caches[0].device)
        return self._buffers[size]

    def _record(self, kind: _Kind) -> None:
        buffers = self._buffers[kind.size]
        self._replays[kind] = self._recorder(lambda: self._compute(buffers, kind))

    def _compute(self, buffers: _Buffers, kind: _Kind) -> None:
        """Launch the step's kernels. Never waits for the device."""
        context = StepContext(buffers.groups(self._kv_caches, self._max_model_len))
        columns = self._rows.columns if kind.has_adapters else self._rows.plain_columns
        hidden = self._model.forward_decode(buffers.row_ids, columns, context)
        logits = self._model.compute_logits(hidden)
        if kind.is_sampled:  # a sampled token's position is the length of its context
            self._rows.sample(logits, buffers.row_ids, buffers.seq_lens, buffers.sampled)
            return
        if self._logits is None:
            num_rows = self._max_num_seqs if len(logits) else 0
            self._logits = logits.new_empty((num_rows, logits.shape[1]))
        self._logits[: len(logits)].copy_(logits)
