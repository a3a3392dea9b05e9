"""DecodeGraphs: whole decode steps on the device, model and sampling, as one CUDA graph per padded batch size.

    rows → begin_decode → layers → logits → sample → last tokens of the rows
           └──────────────── one graph ────────────────┘

A size is recorded when it is seen for the second time, common ones at start; until then the same kernels run one by
one. Where the host takes part in the draw, another graph ends with the logits. Lengths, tokens and parameters are read
on the device (DeviceBatch), so a graph fits any rows. Ranks of a group meet inside the graph, by NCCL: they record the
same sizes at the same steps and replay them in the same order. The largest size is recorded first: its memory is what
all others find room in, where growing sizes would each add their own.

Recording itself needs a GPU and is run by nothing else than scripts/gpu_check; all around it runs anywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.contract import AttentionMetadata
from ..model_step import Model
from ..step_context import StepContext
from .device_batch import DeviceBatch

SIZES_AT_START = (8, 4, 2, 1)  # after the largest
NODE_BYTES = 10 << 10  # what the driver keeps on the device for each kernel of a graph (NVIDIA/cccl pull request 3768)
NODES_PER_LAYER = 16  # at most, of one without experts: a product may be two kernels
CUBLAS_BYTES = 32 << 20  # torch's workspace of each stream that multiplies, here the one that records; of Hopper

Step: TypeAlias = Callable[[], None]


class Recorder(Protocol):
    """Turns a step into one that replays the same launches on the same memory."""

    def record(self, step: Step) -> Step: ...


class CudaRecorder:
    """Records CUDA graphs; all of them share one pool of memory, since one runs at a time.

    A pool ends with the last graph of it and cannot be begun again: other weights take another recorder.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        """`step` must have run once before: what it compiles or allocates for good cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another waits for the tokens of the step before, which may go on.
        with gc_paused(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay


@contextmanager
def gc_paused() -> Iterator[None]:
    """What Python's collector finds may be a kernel or a graph, whose end no recording survives."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def padded_size(num_rows: int, max_size: int) -> int:
    """The batch that a step of `num_rows` is padded to: at most 3 or an eighth more, never over `max_size`."""
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
) -> int:
    """About what graphs take: their pool (cuBLAS' workspace, logits in two precisions and of several ranks once more,
    listed candidates, partial attention), which the largest fills; the logits that the host is given, the block tables
    of every size, and the kernels of each graph: one that draws and one that does not."""
    logits_bytes = vocab_size * (16 if num_ranks == 1 else 24)
    pool = CUBLAS_BYTES + max_num_seqs * (logits_bytes + 16 * 4 * num_heads * (head_dim + 1) + (256 << 10))
    sizes = {padded_size(num_rows, max_num_seqs) for num_rows in range(1, max_num_seqs + 1)}
    return pool + sum(sizes) * max_blocks_per_row * 4 + 2 * len(sizes) * num_layers * NODES_PER_LAYER * NODE_BYTES


class _Buffers:
    """The memory that one size's graph reads and writes."""

    def __init__(self, size: int, max_blocks_per_row: int, device: torch.device) -> None:
        def int64() -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.rows = b""  # those in row_ids, int32
        self.row_ids = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.positions, self.slots, self.sampled = int64(), int64(), int64()
        self.seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((size, max_blocks_per_row), dtype=torch.int32, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def metadata(self, max_model_len: int) -> AttentionMetadata:
        """A new object for each step: who remembers what it derives from one must derive it again."""
        size = len(self.row_ids)
        return AttentionMetadata(
            positions=self.positions,
            slots=self.slots,
            query_starts=self.query_starts,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            num_decode_rows=size,
            query_starts_host=list(range(size + 1)),
            seq_lens_host=[max_model_len] * size,  # unknown to the host: a bound
        )


class DecodeGraphs:
    """Owns the buffers and graphs of each size; the rows are given."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        rows: DeviceBatch,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder,
        sizes_at_start: tuple[int, ...] = SIZES_AT_START,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._rows = rows
        self._recorder = recorder
        self._buffers: dict[int, _Buffers] = {}
        self._logits: Tensor | None = None  # [max_num_seqs, vocab] float32, once they are asked for
        self._seen: set[tuple[int, bool]] = set()  # sizes, and whether tokens are drawn
        self._replays: dict[tuple[int, bool], Step] = {}  # likewise
        self._record_at_start((max_num_seqs, *(size for size in sizes_at_start if size < max_num_seqs)))

    @torch.inference_mode()
    def _record_at_start(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            self._compute(self._buffers_of(size), True)  # of padding alone
            self._record(size, True)

    def unknown_row_ids(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int64] | None:
        """What `run` must be given of these rows: [size], −1 = padding. None: nothing, the last step of this size had
        the same."""
        size = padded_size(len(rows), self._max_num_seqs)
        if size in self._buffers and self._buffers[size].rows == rows.tobytes():
            return None
        row_ids = np.full(size, -1, np.int64)
        row_ids[: len(rows)] = rows
        return row_ids

    def run(self, rows: npt.NDArray[np.int32], row_ids: Tensor | None) -> Tensor:
        """One decode step of these rows [n], which the device knows: the tokens [n] they sample.

        row_ids: `unknown_row_ids` of them, on the device. The tokens are overwritten by the next step.
        """
        return self._run(rows, row_ids, True).sampled[: len(rows)]

    def run_to_logits(self, rows: npt.NDArray[np.int32], row_ids: Tensor | None) -> Tensor:
        """The same without the draw: logits [n, vocab] float32, on other ranks than the first [0, vocab]."""
        self._run(rows, row_ids, False)
        assert self._logits is not None
        return self._logits[: len(rows)]

    def _run(self, rows: npt.NDArray[np.int32], row_ids: Tensor | None, is_drawn: bool) -> _Buffers:
        size = padded_size(len(rows), self._max_num_seqs)
        buffers, key = self._buffers_of(size), (size, is_drawn)
        if key in self._seen and key not in self._replays:
            self._record(size, is_drawn)
        self._seen.add(key)
        if row_ids is not None:
            buffers.row_ids.copy_(row_ids)
            buffers.rows = rows.tobytes()
        if key in self._replays:
            self._replays[key]()
        else:
            self._compute(buffers, is_drawn)
        return buffers

    def _buffers_of(self, size: int) -> _Buffers:
        if size not in self._buffers:
            max_blocks_per_row = self._rows.columns.block_tables.shape[1]
            self._buffers[size] = _Buffers(size, max_blocks_per_row, self._kv_cache.device)
        return self._buffers[size]

    def _record(self, size: int, is_drawn: bool) -> None:
        buffers = self._buffers[size]
        self._replays[size, is_drawn] = self._recorder.record(lambda: self._compute(buffers, is_drawn))

    def _compute(self, buffers: _Buffers, is_drawn: bool) -> None:
        """The step itself; reads nothing back."""
        context = StepContext(buffers.metadata(self._max_model_len), self._kv_cache)
        hidden = self._model.forward_decode(buffers.row_ids, self._rows.columns, context)
        logits = self._model.compute_logits(hidden)
        if is_drawn:  # the token that a row samples stands where its context ends
            self._rows.sample(logits, buffers.row_ids, buffers.seq_lens, buffers.sampled)
            return
        if self._logits is None:
            num_rows = self._max_num_seqs if len(logits) else 0
            self._logits = logits.new_empty((num_rows, logits.shape[1]))
        self._logits[: len(logits)].copy_(logits)
