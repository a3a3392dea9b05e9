"""Steps with adapters on a fake device: each row keeps its own through graphs, mixed steps and reuse of the row.

Each request must get the tokens that the reference operations give it alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.ipc.spec.adapters.targets import targets_of
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.contract import LowRankPart, LowRankUpdate
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.device.fake_device import SMALL, FakeRecorder, Launches, NoWaiting, device_ops, new_runner
from tokenloom.tests.workers.device.row_schedule import COUNTED, GREEDY, WITH_ADAPTERS, admitting, drive
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.tests.workers.random_schedule import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    execute,
    message,
)
from tokenloom.workers.device.cuda_graphs import graph_bytes
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.weights.adapted_layers import Adaptable

NUM_SLOTS, RANK = 3, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("adapters"), "qwen3", **SMALL)


def adapted_model(folder: Path, ops: Ops) -> DecoderModel:
    """Load a model and fill slots 1 and 2 of all of its layers; slot 3 stays empty."""
    config = load_model_config(folder)
    adapters = Adaptable(ops.adapter_space(NUM_SLOTS, RANK), frozenset(targets_of(config)))
    model = load_model(folder, config, 512, torch.float32, CPU, ops, ParallelGroup(), adapters=adapters)
    assert model.adapted is not None
    generator = torch.Generator().manual_seed(0)
    for layer in model.adapted.linears:
        for slot in (1, 2):
            parts = []
            for part in layer.parts:
                a = torch.randn(RANK, len(part.inputs), generator=generator) / len(part.inputs) ** 0.5
                b = torch.randn(len(part.outputs), RANK, generator=generator) / 2
                parts.append(LowRankPart(part.first_output, a, b))
            layer.slots.fill(slot, LowRankUpdate(parts))
    return model


def alone(model: DecoderModel, name: str, count: int) -> list[int]:
    """Return the first tokens of a request without others."""
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    kv_cache = spec.allocate(NUM_BLOCKS, CPU)
    batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, [NUM_BLOCKS], max_loras=NUM_SLOTS)
    runner = ModelRunner(model, batch, [kv_cache], ParallelGroup())
    request = WITH_ADAPTERS.requests[name]
    admitted, appends = admitting(request, 1, GREEDY)
    tokens = execute(runner, message([request.row], [len(request.prompt)], [], [admitted], appends)).token_ids
    for _ in range(count - 1):
        tokens += execute(runner, message([request.row], [1])).token_ids
    return tokens


def device_runner(model: DecoderModel, recorder: FakeRecorder | None) -> ModelRunner:
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    return new_runner(recorder, model, [spec.allocate(NUM_BLOCKS, CPU)], max_loras=NUM_SLOTS)


@pytest.mark.parametrize(
    ("sampling", "num_in_flight", "has_graphs"),
    [
        (GREEDY, 2, True),
        pytest.param(GREEDY, 1, False, marks=pytest.mark.nightly),
        pytest.param(COUNTED, 1, True, marks=pytest.mark.nightly),
    ],
)
def test_each_request_gets_the_tokens_that_its_adapter_gives_it_alone(
    checkpoint: Path, sampling: RowSampling, num_in_flight: int, has_graphs: bool
) -> None:
    recorder = FakeRecorder()
    runner = device_runner(adapted_model(checkpoint, device_ops()), recorder if has_graphs else None)
    found = drive(runner, WITH_ADAPTERS, num_in_flight, sampling, NoWaiting)
    reference = adapted_model(checkpoint, ReferenceOps())
    for name, tokens in found.items():
        assert tokens == alone(reference, name, len(tokens))
    assert [len(tokens) for tokens in found.values()] == [7, 4, 5, 3, 3]
    assert found["a again"] != found["late"]  # of the same prompt
    assert recorder.num_replays or not has_graphs
    assert runner._device_runner is not None
    slots = runner._device_runner.rows.columns.adapter_slots
    assert slots is not None and slots.tolist() == [0, 1, *[0] * (MAX_NUM_SEQS - 1)]  # the last is of padding


def test_a_decode_step_takes_launches_for_adapters_only_if_one_of_its_rows_has_one(checkpoint: Path) -> None:
    model, recorder = adapted_model(checkpoint, device_ops()), FakeRecorder()
    runner = device_runner(model, recorder)
    for name in ("a", "none"):
        request = WITH_ADAPTERS.requests[name]
        admitted, appends = admitting(request, 1, GREEDY)
        execute(runner, message([request.row], [len(request.prompt)], [], [admitted], appends))
        with Launches() as launches:
            runner.start(message([request.row], [1]))
        runner.finish()
        has_adapter, num_layers = name == "a", load_model_config(checkpoint).num_layers
        assert launches.counts["list_slots_kernel"] == launches.counts["look_up_kernel"] == has_adapter
        assert launches.counts["shrink_kernel"] == has_adapter * (4 * num_layers + 1)
        assert launches.counts["expand_kernel"] == has_adapter * (4 * num_layers + 2)
        assert launches.counts["gemv_kernel"] == 4 * num_layers + 1
        assert launches.counts["activation_kernel"] == 0
    assert recorder.num_replays == 2


def test_graphs_of_steps_with_adapters_are_counted_beside_the_others() -> None:
    shape = (64, 151_936, 32, 128, 36, 2560, 1)
    plain, both = graph_bytes(*shape), graph_bytes(*shape, has_adapters=True)
    assert both - plain >= 2 * 18 * 36 * (12 + 8) * 10_000  # see test_graph_bytes_counts_the_kernels_of_each_graph
