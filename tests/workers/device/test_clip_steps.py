"""Steps of rows that begin with clips give the plain runner's tokens on a device, by graph where no clip is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tokenloom.ipc.messages.workers import NewRow, RowSampling, SchedulerOutput
from tokenloom.ipc.spec.models.model_config import CrossConfig
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.tests.support.whisper_checkpoints import START_ID, whisper_checkpoint
from tokenloom.tests.workers.device.fake_device import FakeRecorder, device_ops
from tokenloom.tests.workers.models.test_whisper import load_decoder
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.tests.workers.random_schedule import frame, message, new_row, sampled_by
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.features.media.clip_inputs import ClipInputs
from tokenloom.workers.features.media.clip_rows import ClipRows
from tokenloom.workers.machine.arrays import ids_of
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.runner_feature import RunnerFeature
from tokenloom.workers.step.step_inputs import StepInputs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: 32-bit words wrap in the interpreter

BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS, MAX_MODEL_LEN = 4, 65, 14, 32
SIZES = {
    "d_model": 32,
    "decoder_attention_heads": 2,
    "decoder_layers": 1,
    "max_source_positions": NUM_ROWS,
    "max_target_positions": 14,
}
CROSS = CrossConfig(num_rows=NUM_ROWS, num_tokens=16)


class ClipMedia(RunnerFeature):
    """In place of a MediaRunner: entry i holds the i-th of random clips."""

    def __init__(self, hidden_size: int) -> None:
        clips = torch.randn(4, NUM_ROWS, hidden_size, generator=torch.Generator().manual_seed(0))

        def take(entry: int, first: int, count: int) -> Tensor:
            return clips[entry - 1, first : first + count]

        self.inputs = ClipInputs(ClipRows(4, CROSS, BLOCK_SIZE), take, torch.zeros(1, hidden_size))

    def update(self, step: SchedulerOutput) -> None:
        self.inputs.rows.free(ids_of(step.freed_rows))
        for new in step.new_rows:
            self.inputs.rows.admit(new)
        self.inputs.rows.bind(ids_of(step.span_entries).reshape(-1, 3))

    def prepare(self, inputs: StepInputs) -> StepInputs:
        return self.inputs.prepare(inputs)

    def clear(self) -> None:
        self.inputs.rows.clear()


def runner_of(folder: Path, ops: Ops, recorder: FakeRecorder | None) -> ModelRunner:
    """Return a runner that samples on the device, if there is a recorder, or else on the host."""
    model, media = load_decoder(folder, ops, block_size=BLOCK_SIZE), ClipMedia(SIZES["d_model"])
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    kv_cache, group = spec.allocate(NUM_BLOCKS, CPU), ParallelGroup()
    batch = InputBatch(4, MAX_MODEL_LEN, BLOCK_SIZE, [NUM_BLOCKS])
    device = None
    if recorder is not None:
        limits = (4, MAX_MODEL_LEN)
        device = DeviceRunner(model, [kv_cache], *limits, group, recorder, (1,), shifts=media.inputs.shifts)
    return ModelRunner(model, batch, [kv_cache], group, device_runner=device, features=[media])


def clip_row(row: int, tokens: list[int], computed: int = 0, temperature: float = 0.0) -> NewRow:
    ids = [START_ID] * CROSS.num_tokens + tokens
    spans = frame(0, CROSS.num_tokens, 1, 1, 1)
    return replace(new_row(row, ids, computed, RowSampling(temperature=temperature, seed=row)), spans=spans)


def steps() -> list[SchedulerOutput]:
    """Two rows whose clips are written over several steps, a third beside decoding ones, whose clip row 0 has written,
    and decode steps of all."""

    def blocks(row: int, first: int, count: int) -> list[int]:
        return [value for i in range(count) for value in (row, 0, first + i)]

    def bound(step: SchedulerOutput, *triples: int) -> SchedulerOutput:
        return replace(step, span_entries=frame(*triples))

    new_rows = [clip_row(0, [5, 6, 7]), clip_row(1, [8], temperature=0.8)]
    appends = [*blocks(0, 11, 8), *blocks(1, 21, 8)]
    shared = [value for block in (11, 12, 13, 14) for value in (2, 0, block)]
    third = [clip_row(2, [9, 10], computed=CROSS.num_tokens, temperature=1.1)]
    return [
        bound(message([0, 1], [5, 1], [], new_rows, appends), 0, 0, 1, 1, 0, 2),  # clips alone
        message([0, 1], [14, 14]),  # row 0 has all its tokens, row 1 is in the padding of its clip
        message([0, 1], [1, 2]),
        *[message([0, 1], [1, 1])] * 2,
        message([0, 1, 2], [1, 1, 2], [], third, [*shared, *blocks(2, 31, 4)]),
        *[message([0, 1, 2], [1, 1, 1])] * 2,
        bound(message([1, 2, 0], [1, 1, 17], [0], [clip_row(0, [11])], blocks(0, 41, 8)), 0, 0, 3),
        *[message([0, 1, 2], [1, 1, 1])] * 2,
    ]


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    return [sampled_by(runner.execute(step)).token_ids for step in steps()]


def test_graphs_give_the_tokens_of_the_plain_runner(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = whisper_checkpoint(tmp_path, has_rules=False, **SIZES)
    recorder = FakeRecorder()
    found = tokens_of(runner_of(folder, device_ops(), recorder))
    assert found == tokens_of(runner_of(folder, ReferenceOps(), None))
    assert list(map(len, found)) == [0, 1, 2, 2, 2, *[3] * 6]
    assert recorder.num_replays >= 3, "decode steps run as graphs"
    assert len(np.unique(np.concatenate(found))) > 10
