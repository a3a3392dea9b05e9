"""On a GPU: adapters' updates are the reference's, rows keep their bits in any mix, fills and graphs change no token.

Tolerances are relative to the largest element of the reference in float32: TOLERANCE[dtype].
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenloom import LLM, SamplingParams
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.ipc.params.lora_request import LoRARequest
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.contract import LowRankUpdate, Routing
from tokenloom.kernels.quantized import quantize
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.kernels.gpu.test_low_rank import ACTIVATIONS, NUM_SLOTS, RANKS, mixed_slots, random_update
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.device.row_schedule import COUNTED, GREEDY, WITH_ADAPTERS, drive
from tokenloom.tests.workers.features.adapters.adapted_model import fill
from tokenloom.tests.workers.random_schedule import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_BLOCKS
from tokenloom.workers.device.cuda_graphs import CudaRecorder
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.features.adapters.slot_filler import SlotFiller, adaptable
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype] * max(float(expected.abs().max()), 1e-3)
    torch.testing.assert_close(actual.cpu().float(), expected, atol=bound, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layers_with_adapters_agree_with_the_reference(dtype: torch.dtype, form: str, device: torch.device) -> None:
    rng = random.Random(f"{dtype} {form}")
    torch.manual_seed(0)
    for activation, (num_inputs, num_outputs) in zip(ACTIVATIONS, SIZES.adapted, strict=True):
        weight, bias = torch.randn(num_outputs, num_inputs) / num_inputs**0.5, torch.randn(num_outputs)
        updates = [random_update(rng, num_outputs, num_inputs, 3) for _ in range(NUM_SLOTS - 1)]
        ops, reference = select_ops(device, dtype), ReferenceOps()
        plain = weight.to(dtype)
        coded = quantize(plain.float(), "int8") if form == "int8" else plain.float()
        here = quantize(plain.to(device), "int8") if form == "int8" else plain.to(device)
        both = []
        for each, matrix, vector in ((ops, here, bias.to(device, dtype)), (reference, coded, bias.to(dtype).float())):
            space, packed = each.adapter_space(NUM_SLOTS, max(RANKS)), each.pack_linear(matrix, vector, activation)
            slots = space.attach(packed, 3)
            for slot, update in enumerate(updates, 1):
                slots.fill(slot, update)
            space.wait_for_fills()
            both.append((space, packed))
        for num_tokens in SIZES.adapted_tokens:
            x, slots_of = torch.randn(num_tokens, num_inputs).to(dtype), mixed_slots(num_tokens)
            for space, _ in both:
                space.begin_step(slots_of.to(device) if space is both[0][0] else slots_of)
            expected = reference.linear(x.float(), both[1][1])
            assert_near(ops.linear(x.to(device), both[0][1]), expected, dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_with_adapters_agree_with_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    rng, num_experts, hidden, inner = random.Random(0), 16, 256, 128
    torch.manual_seed(0)
    shapes = ((2 * inner, hidden), (hidden, inner))
    matrices = [[(torch.randn(shape) / 16).to(dtype) for _ in range(num_experts)] for shape in shapes]
    fills = [
        [
            [random_update(rng, *shape, parts, 16) for _ in range(num_experts)]
            for shape, parts in zip(shapes, (2, 1), strict=True)
        ]
        for _ in range(NUM_SLOTS - 1)
    ]
    x, scores, slots = torch.randn(70, hidden).to(dtype), torch.randn(70, num_experts).to(dtype), mixed_slots(70)
    found = []
    for ops, where, kind in (
        (select_ops(device, dtype), device, dtype),
        (ReferenceOps(), torch.device("cpu"), torch.float32),
    ):
        packed = ops.pack_experts(*([weight.to(where, kind) for weight in each] for each in matrices))
        space = ops.adapter_space(NUM_SLOTS, 16)
        layer = space.attach_experts(packed, 2)
        for slot, (ups, downs) in enumerate(fills, 1):
            layer.fill(slot, ups, downs)
        space.wait_for_fills()
        space.begin_step(slots.to(where))
        routing = Routing(4, is_normalized=True)
        found.append(ops.fused_moe(x.to(where, kind), scores.to(where, kind), packed, routing))
    assert_near(found[0], found[1], dtype)


@torch.inference_mode()
def test_a_slot_is_filled_beside_steps_that_use_another(device: torch.device) -> None:
    """Its content counts from `wait_for_fills` on; 50 MB pass through the pinned buffers many times."""
    rng, ops = random.Random(0), select_ops(device, torch.bfloat16)
    torch.manual_seed(0)
    num_outputs, num_inputs, rank = SIZES.filled
    weight = torch.zeros(num_outputs, num_inputs, device=device, dtype=torch.bfloat16)
    x = torch.ones(4, num_inputs, device=device, dtype=torch.bfloat16)
    packed, space = ops.pack_linear(weight, None), ops.adapter_space(2, rank)
    layer = space.attach(packed, 2)
    updates = [random_update(rng, num_outputs, num_inputs, 2, rank=rank) for _ in range(4)]
    expected = []
    for update in updates:
        layer.fill(1, LowRankUpdate(update.parts))
        space.wait_for_fills()
        space.begin_step(torch.ones(4, device=device, dtype=torch.int32))
        expected.append(ops.linear(x, packed))
    space.begin_step(torch.ones(4, device=device, dtype=torch.int32))
    for update, wanted in zip(updates, expected, strict=True):
        layer.fill(2, LowRankUpdate(update.parts))
        busy = [ops.linear(x, packed) for _ in range(SIZES.num_launches)]
        space.wait_for_fills()
        assert all(torch.equal(each, expected[-1]) for each in busy)
        space.begin_step(torch.full((4,), 2, device=device, dtype=torch.int32))
        assert torch.equal(ops.linear(x, packed), wanted)
        space.begin_step(torch.ones(4, device=device, dtype=torch.int32))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("adapters")
    checkpoint = tiny_checkpoint(folder / "model", "qwen3")
    return checkpoint, write_adapters(folder / "adapters", checkpoint, 4)


def new_runner(
    adapted: tuple[Path, list[Path]], device: torch.device, ops: Ops, has_graphs: bool | None
) -> ModelRunner:
    """Make a runner with adapters in slots 1 and 2. has_graphs: None: without a device runner."""
    (folder, adapters), config = adapted, EngineConfig(enable_lora=True, max_loras=3, max_lora_rank=16)
    model_config = load_model_config(folder)
    place = (MAX_MODEL_LEN, torch.float32, device, ops, ParallelGroup())
    model = load_model(folder, model_config, *place, adapters=adaptable(ops, model_config, config))
    assert model.adapted is not None
    filler = SlotFiller(
        model.adapted, model_config, config, lambda: Checkpoint(folder, torch.float32, torch.device("cpu"), None)
    )
    for slot in (1, 2):
        fill(filler, slot, adapters[slot])
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    kv_cache = spec.allocate(NUM_BLOCKS, device)
    device_runner = None
    if has_graphs is not None:
        limits, recorder = (MAX_NUM_SEQS, MAX_MODEL_LEN), CudaRecorder() if has_graphs else None
        device_runner = DeviceRunner(model, [kv_cache], *limits, ParallelGroup(), recorder, has_adapters=True)
    batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, [NUM_BLOCKS], max_loras=3)
    return ModelRunner(model, batch, [kv_cache], ParallelGroup(), device_runner=device_runner)


@pytest.mark.parametrize("sampling", [GREEDY, COUNTED])
def test_graphs_with_adapters_change_no_token(
    sampling: RowSampling, adapted: tuple[Path, list[Path]], device: torch.device
) -> None:
    def ops() -> Ops:
        return select_ops(device, torch.float32, is_batch_invariant=True)

    plain = drive(new_runner(adapted, device, ops(), None), WITH_ADAPTERS, 1, COUNTED)
    assert plain["a again"] != plain["late"]
    for has_graphs in (False, True):
        num_in_flight = 1 if sampling is COUNTED else 2
        runner = new_runner(adapted, device, ops(), has_graphs)
        assert drive(runner, WITH_ADAPTERS, num_in_flight, sampling) == plain
        if sampling is GREEDY:
            runner.clear()
            torch.cuda.set_sync_debug_mode("error")  # all kernels are compiled: no start of a step waits
            try:
                assert drive(runner, WITH_ADAPTERS, num_in_flight, sampling) == plain
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_an_engine_answers_with_adapters_as_on_the_cpu(adapted: tuple[Path, list[Path]], device: torch.device) -> None:
    folder, adapters = adapted
    prompts = [[7 + i, *range(20 + i, 30 + 2 * i)] for i in range(10)]
    requests = [LoRARequest(f"a{i % 5}", 1 + i, str(adapters[i % 5])) if i % 5 < 4 else None for i in range(10)]
    answers = []
    for where in ("cpu", device.type):
        options = {**SIZES.limits, "device": where, "dtype": "float32", "max_model_len": 128, "num_kv_blocks": 256}
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_num_seqs": 8}
        with LLM(folder, **options) as llm:  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_slots_that_do_not_fit_are_refused_with_their_size(tmp_path: Path, device: torch.device) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", hidden_size=1024, intermediate_size=4096)
    num_slots, rank = SIZES.refused
    with pytest.raises(ConfigError, match=r"slots take .* GiB already: lower --max-loras or --max-lora-rank"):
        LLM(folder, device=device.type, enable_lora=True, max_loras=num_slots, max_lora_rank=rank, in_process=True)
