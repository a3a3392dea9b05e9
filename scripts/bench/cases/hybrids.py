"""Time steps of hybrids on the CPU: as one call of the kernels, layer by layer, and on transformers' layers.

    engine-launch bench hybrids [MODEL ...]

All three have equal weights in bf16 and one thread. Each round takes a step of each in turn; a decode step continues
where the one before it ended. Milliseconds are CPU time of the thread, the median of the rounds; `layers_to_call` and
`transformers_to_call` are medians of the time relative to that of the call. `differs`: the largest difference of the
logits of call and layers, as a share of the largest logit. Models as in workload.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.contract import DecoderWeights, FusedDecoder, StateViews
from tokenloom.kernels.cpu.cpu_ops import CpuOps, load_cpu_ops
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import find_checkpoint
from tokenloom.workers.borrowed.load import load_borrowed
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.model_step import Model, compute
from tokenloom.workers.step.profile import dummy_step
from tokenloom.workers.step.step_inputs import StateInputs

CPU, DTYPE, BLOCK_SIZE, CONTEXT, MAX_MODEL_LEN = torch.device("cpu"), torch.bfloat16, 16, 64, 1024
MODELS = ["190m-qwen3.5", "60m-qwen3.5", "170m-bamba", "50m-granite-h", "140m-lfm2"]
CASES = {"1 row": (1, 1), "8 rows": (8, 1), "prompt of 256": (1, 256)}  # rows, new tokens of each

Step = Callable[[], Tensor]


class LayerOps(CpuOps):
    """The C operations without fused decoders."""

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        return None


class Rows:
    """Rows of a model, with keys and values of noise and with states of their own."""

    def __init__(self, model: Model, num_rows: int) -> None:
        self._model, self._num_rows, self._length = model, num_rows, 0
        torch.manual_seed(0)  # the same noise for all models
        specs = model.kv_cache_specs(BLOCK_SIZE, DTYPE)
        self._num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
        self._kv_caches = [spec.allocate(num_rows * self._num_blocks + 1, CPU).normal_() for spec in specs]
        self._states: StateViews | None = None
        if model.state_spec is not None:
            self._states = model.state_spec.view(
                torch.zeros((num_rows + 1) * model.state_spec.block_bytes, dtype=torch.uint8)
            )

    def add(self, count: int) -> Tensor:
        """Compute `count` further tokens of each row; return the logits of the last ones."""
        self._length += count
        counts, lengths = [count] * self._num_rows, [self._length] * self._num_rows
        inputs = dummy_step(counts, lengths, BLOCK_SIZE, len(self._kv_caches))
        tables = 1 + np.arange(self._num_rows * self._num_blocks, dtype=np.int32).reshape(self._num_rows, -1)
        groups = [group._replace(block_tables=tables) for group in inputs.groups]
        token_ids = np.random.default_rng(self._length).integers(256, size=len(inputs.token_ids), dtype=np.int32)
        inputs = inputs._replace(groups=groups, token_ids=token_ids)
        if self._states is not None:
            blocks = 1 + np.arange(self._num_rows, dtype=np.int32)
            reads = np.full_like(blocks, -1) if self._length == count else blocks
            inputs = inputs._replace(states=StateInputs(inputs.query_starts, reads, blocks))
        _, logits = compute(self._model, inputs, self._kv_caches, self._states)
        return logits


def step_of(model: Model, num_rows: int, count: int) -> Step:
    """Return a function that computes the next token of each row, or a prompt of `count` tokens."""
    if count > 1:
        return lambda: Rows(model, num_rows).add(count)
    rows = Rows(model, num_rows)
    rows.add(CONTEXT)
    return lambda: rows.add(1)


def load(folder: Path, ops: CpuOps) -> Model:
    return load_model(folder, load_model_config(folder), MAX_MODEL_LEN, DTYPE, CPU, ops, ParallelGroup())


def load_all(folder: Path, setup: Setup) -> dict[str, Model]:
    """Return the models by name, each over the same weights."""
    ops = load_cpu_ops(DTYPE, isa=setup.arguments.cpu_isa)
    models = {"call": load(folder, ops), "layers": load(folder, LayerOps(ops.library, DTYPE))}
    setup.report.note("kernels", ops.kernels)
    if setup.arguments.transformers:
        config = load_model_config(folder, implementation="transformers")
        plain = EngineConfig(skip_self_check=True)
        models["transformers"] = load_borrowed(folder, config, plain, MAX_MODEL_LEN, DTYPE, CPU, ops)
    return models


def cpu_s(step: Step) -> float:
    begun = time.thread_time()
    step()
    return time.thread_time() - begun


def measure(setup: Setup) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name in setup.arguments.models or MODELS:
            models = load_all(find_checkpoint(name), setup)
            for case, shape in CASES.items():
                steps = {each: step_of(model, *shape) for each, model in models.items()}
                found = {each: step().clone() for each, step in steps.items()}
                took = [{each: cpu_s(step) for each, step in steps.items()} for _ in range(setup.arguments.rounds)]
                row = {f"{each}_ms": median([seconds[each] for seconds in took]) * 1e3 for each in models}
                for each in list(models)[1:]:
                    row[f"{each}_to_call"] = median([seconds[each] / seconds["call"] for seconds in took])
                largest = found["layers"].abs().max()
                row["differs"] = float((found["call"] - found["layers"]).abs().max() / largest)
                setup.report.add(model=name, case=case, **row)


OPTIONS = {
    "models": ([], f"default: {', '.join(MODELS)}"),
    "--transformers": (True, "also on transformers' layers"),
    "--cpu-isa": ("auto", "as of engine-launch"),
}
CASE = Case("hybrids", measure, OPTIONS, model="", rounds=20)
