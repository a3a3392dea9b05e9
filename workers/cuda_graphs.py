"""DecodeGraphs: whole decode steps on the device, model and sampling, as one CUDA graph per padded batch size.

    rows → prepare_step → forward → logits → sample → last tokens of the rows
           └───────────────── one graph ─────────────────┘

A size is recorded when it is seen for the second time, common ones at start; until then the same kernels run one by
one. Lengths, tokens and parameters are read on the device (DeviceRows), so a graph fits any rows. Ids return on a
stream of their own. Takes steps of plain decode rows only: rules, logprobs and masks are the ModelRunner's.

Recording itself needs a GPU and is run by nothing else than scripts/gpu_check; all around it runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.ops import AttentionMetadata
from ..kernels.triton_sampling import sample
from ..kernels.triton_step import prepare_step
from .device_rows import DeviceRows
from .input_batch import StepInputs
from .sampling_columns import SamplingColumns

SIZES_AT_START = (1, 2, 4, 8)

Step: TypeAlias = Callable[[], None]


class Model(Protocol):
    """What a step computes; see DecoderModel for shapes."""

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class Recorder(Protocol):
    """Turns a step into one that replays the same launches on the same memory."""

    def record(self, step: Step) -> Step: ...


class CudaRecorder:
    """Records CUDA graphs; all of them share one pool of memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        """`step` must have run once before: what it compiles or allocates for good cannot be recorded."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        replay: Step = graph.replay
        return replay


def padded_size(num_rows: int, max_size: int) -> int:
    """The batch that a step of `num_rows` is padded to: at most 3 or an eighth more, never over `max_size`."""
    if num_rows <= 2:
        return num_rows
    grain = max(4, 1 << max((num_rows - 1).bit_length() - 4, 0))
    return min(-(-num_rows // grain) * grain, max_size)


def graph_bytes(max_num_seqs: int, vocab_size: int, num_heads: int, head_dim: int) -> int:
    """About what the pool of the graphs grows to: logits in two precisions, listed candidates, partial attention."""
    return max_num_seqs * (12 * vocab_size + 16 * 4 * num_heads * (head_dim + 1) + (256 << 10))


class _Buffers:
    """The memory that one size's graph reads and writes."""

    def __init__(self, size: int, max_blocks_per_row: int, device: torch.device) -> None:
        def int64() -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.row_ids = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.next_positions, self.slots = int64(), int64(), int64(), int64()
        self.sampled = int64()
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
            max_seq_len=max_model_len,
        )


class DecodeGraphs:
    """Owns the rows on the device, the buffers and graphs of each size."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder,
        sizes_at_start: tuple[int, ...] = SIZES_AT_START,
    ) -> None:
        self._model: Model | None = model
        self._kv_cache = kv_cache
        self._block_size = kv_cache.shape[4]
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._max_blocks_per_row = -(-max_model_len // self._block_size)
        device = kv_cache.device
        self._rows = DeviceRows(max_num_seqs, self._max_blocks_per_row, self._block_size, device)
        self._recorder = recorder
        self._buffers: dict[int, _Buffers] = {}
        self._replays: dict[int, Step] = {}
        self._return = _TokenReturn(max_num_seqs, device)
        self._sizes_at_start = tuple(size for size in sizes_at_start if size <= max_num_seqs)
        self._record_at_start()

    @property
    def recorded_sizes(self) -> list[int]:
        return sorted(self._replays)

    def forget(self, rows: npt.NDArray[np.int32]) -> None:
        """These rows were freed."""
        self._rows.forget(rows)

    def clear(self) -> None:
        """All rows were freed."""
        self._rows.clear()

    def drop_model(self) -> None:
        """Let go of the weights and of the graphs that read them; `take_model` must follow before the next step."""
        self._model = None
        self._replays.clear()
        self._buffers.clear()

    def take_model(self, model: Model) -> None:
        """Go on with other weights of the same shape."""
        self._model = model
        self._record_at_start()

    def _record_at_start(self) -> None:
        for size in self._sizes_at_start:
            self._compute(self._buffers_of(size))  # of padding alone
            self._record(size)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, columns: SamplingColumns) -> npt.NDArray[np.int64]:
        """One decode step: every row has one token to compute and samples one. columns: of inputs.rows. Returns [n]."""
        num_rows = len(inputs.rows)
        size = padded_size(num_rows, self._max_num_seqs)
        is_new = size not in self._buffers
        buffers = self._buffers_of(size)
        if not is_new and size not in self._replays:
            self._record(size)
        self._rows.update(inputs, columns, buffers.row_ids)
        if is_new:
            self._compute(buffers)
        else:
            self._replays[size]()
        return self._return.fetch(buffers.sampled[:num_rows])

    def _buffers_of(self, size: int) -> _Buffers:
        if size not in self._buffers:
            self._buffers[size] = _Buffers(size, self._max_blocks_per_row, self._kv_cache.device)
        return self._buffers[size]

    @torch.inference_mode()
    def _record(self, size: int) -> None:
        buffers = self._buffers[size]
        self._replays[size] = self._recorder.record(lambda: self._compute(buffers))

    @torch.inference_mode()
    def _compute(self, buffers: _Buffers) -> None:
        """The step itself; reads nothing back."""
        assert self._model is not None, "take_model comes after drop_model"
        rows = self._rows
        prepare_step(
            buffers.row_ids,
            rows.last_tokens,
            rows.num_computed,
            rows.block_tables,
            buffers.token_ids,
            buffers.positions,
            buffers.next_positions,
            buffers.slots,
            buffers.seq_lens,
            buffers.block_tables,
            self._block_size,
        )
        metadata = buffers.metadata(self._max_model_len)
        hidden = self._model.forward(buffers.token_ids, metadata, self._kv_cache)
        logits = self._model.compute_logits(hidden).contiguous()
        sampled = sample(
            logits,
            buffers.row_ids,
            rows.temperatures,
            rows.top_ks,
            rows.top_ps,
            rows.min_ps,
            rows.seeds,
            buffers.next_positions,
        )
        buffers.sampled.copy_(sampled)
        rows.last_tokens[buffers.row_ids] = sampled  # −1 is the last entry, which is nobody's


class _TokenReturn:
    """Brings sampled ids to the host on a stream of its own, so that the next step need not wait for them."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._host = torch.zeros(max_num_seqs, dtype=torch.int64).pin_memory()
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, token_ids: Tensor) -> npt.NDArray[np.int64]:
        """[n] once they are here."""
        if not self._is_cuda:
            copied: npt.NDArray[np.int64] = token_ids.numpy().copy()
            return copied
        host = self._host[: len(token_ids)]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(token_ids, non_blocking=True)
            self._event.record()
        self._event.synchronize()
        ids: npt.NDArray[np.int64] = host.numpy().copy()
        return ids
