"""DeviceSteps: times a GPU's back-to-back decode steps without an engine, the bound for a step's time.

Same parts as in the engine: staging, rows, graph, sampling. Blocks are scattered and hold noise. Returns no tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.workers.device.cuda_graphs import CudaRecorder
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model
from tokenloom.workers.sampling.sampling_columns import SamplingColumns
from tokenloom.workers.step.profile import dummy_step
from tokenloom.workers.step.step_inputs import StepInputs

BLOCK_SIZE = 16
NUM_WARM_UPS = 5


class DeviceSteps:
    """`num_rows` rows whose contexts have `context` tokens halfway through the `num_steps` timed steps."""

    @torch.inference_mode()
    def __init__(self, folder: Path, dtype: torch.dtype, num_rows: int, context: int, num_steps: int) -> None:
        device, group = torch.device("cuda"), ParallelGroup()
        self._num_steps, self._first = num_steps, max(context - num_steps // 2 - NUM_WARM_UPS, 1)
        max_model_len = self._first + num_steps + NUM_WARM_UPS
        ops = select_ops(device, dtype)
        model = load_model(folder, load_model_config(folder), max_model_len, dtype, device, ops, group)
        width = -(-max_model_len // BLOCK_SIZE)
        (spec,) = model.kv_cache_specs(BLOCK_SIZE, dtype)
        cache = torch.randn(spec.shape(num_rows * width + 1), dtype=dtype, device=device)
        self._blocks = np.random.default_rng(0).permutation(num_rows * width).astype(np.int32).reshape(num_rows, width)
        self._runner = DeviceRunner(model, [cache], num_rows, max_model_len, group, CudaRecorder(), sizes_at_start=())

    def _inputs(self, length: int) -> StepInputs:
        num_rows = len(self._blocks)
        inputs = dummy_step([1] * num_rows, [length] * num_rows, BLOCK_SIZE)
        (group,) = inputs.groups
        return inputs._replace(groups=[group._replace(block_tables=self._blocks + 1)])

    @torch.inference_mode()
    def milliseconds(self, sampling: RowSampling) -> float:
        """Return the ms of one step in which all rows use `sampling`."""
        columns = SamplingColumns.greedy(len(self._blocks))
        for row in range(len(self._blocks)):
            columns.put(row, sampling)
        self._runner.rows.clear()
        inputs = [self._inputs(self._first + step) for step in range(NUM_WARM_UPS + self._num_steps)]
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for each in inputs[:NUM_WARM_UPS]:
            self._runner.launch(each, columns)
        begun.record()
        for each in inputs[NUM_WARM_UPS:]:
            self._runner.launch(each, columns)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / self._num_steps
