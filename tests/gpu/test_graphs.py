"""On a GPU: sampling is the definition's, rows do not feel their neighbours; graphs and overlap change no token."""

from __future__ import annotations

import random
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.kernels.select import select_ops
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.kernels.gpu.test_sampling import draw, random_logits, random_rows, sample_rows
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.paged_run import PagedRun, load
from tokenloom.tests.workers.random_schedule import message, new_row, sampled_by
from tokenloom.workers.device.cuda_graphs import CudaRecorder
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_runner import ModelRunner
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.step.input_batch import InputBatch

pytestmark = pytest.mark.gpu

BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 16, 512, SIZES.num_rows


@torch.inference_mode()
@pytest.mark.parametrize("vocab_size", SIZES.vocab_sizes)
def test_draws_are_those_of_the_definition(vocab_size: int, device: torch.device) -> None:
    num_close = num_rows = 0
    for seed in range(SIZES.num_draws):
        rng = random.Random(seed)
        rows = random_rows(rng, 8)
        logits = random_logits(rng, len(rows), vocab_size)
        for token, row, values in zip(sample_rows(logits.to(device), rows), rows, logits.numpy(), strict=True):
            wanted, is_close = draw(values, row)
            assert is_close or token == wanted, row
            num_close, num_rows = num_close + is_close, num_rows + 1
    assert num_close < num_rows / 3


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_logits_have_the_same_bits_in_any_way(
    dtype: torch.dtype, family: str, device: torch.device, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    model = load(folder, dtype, device=device, ops=select_ops(device, dtype, is_batch_invariant=True))
    rng = random.Random(0)
    tokens = [rng.randrange(200) for _ in range(SIZES.prompt_length)]
    others = {f"o{i}": [rng.randrange(200) for _ in range(rng.randrange(1, 60))] for i in range(SIZES.num_neighbours)}

    def run() -> PagedRun:
        return PagedRun(model, BLOCK_SIZE, 4096, dtype, device, rng.randrange(100))

    wanted = run().step({"a": tokens})["a"]
    assert torch.equal(run().step({**others, "a": tokens})["a"], wanted)
    chunked, length = run(), SIZES.prompt_length
    bounds = [0, 7, 8, length * 3 // 7, length - 10, *range(length - 9, length + 1)]
    few = {name: ids[:1] for name, ids in others.items()}
    parts = [chunked.step({"a": tokens[i:j], **few})["a"] for i, j in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), wanted)


def load_exact(folder: Path, device: torch.device) -> DecoderModel:
    """No token depends on the size of a batch."""
    ops = select_ops(device, torch.float32, is_batch_invariant=True)
    return load(folder, max_model_len=MAX_MODEL_LEN, device=device, ops=ops)


def new_runner(folder: Path, device: torch.device, has_graphs: bool, is_on_device: bool = True) -> ModelRunner:
    model = load_exact(folder, device)
    num_blocks = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    kv_cache = spec.allocate(num_blocks, device)
    device_runner = None
    if is_on_device:
        recorder = CudaRecorder() if has_graphs else None
        device_runner = DeviceRunner(model, [kv_cache], MAX_NUM_SEQS, MAX_MODEL_LEN, ParallelGroup(), recorder)
    batch = InputBatch(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, [num_blocks])
    return ModelRunner(model, batch, [kv_cache], ParallelGroup(), device_runner=device_runner)


def drive(runner: ModelRunner, num_steps: int, num_in_flight: int, num_logprobs: int = -1) -> list[list[int]]:
    """Tokens of each row: rows join and leave by turns, so that sizes, lengths and mixed steps alternate.

    num_logprobs: of each row; with them the host takes part in every step.
    """
    rng = random.Random(0)
    width = MAX_MODEL_LEN // BLOCK_SIZE
    outputs: list[list[int]] = [[] for _ in range(MAX_NUM_SEQS)]
    active: list[int] = []
    num_started = 0

    def finish() -> None:
        sampled = sampled_by(runner.finish())
        for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
            outputs[row].append(token)

    for step in range(num_steps):
        new_rows, appends, freed = [], list[int](), list[int]()
        if step % 17 == 16:
            freed = [active.pop(rng.randrange(len(active)))]
        if step % 5 == 0 and len(active) < MAX_NUM_SEQS:
            row = min(set(range(MAX_NUM_SEQS)) - set(active))
            prompt = [rng.randrange(200) for _ in range(rng.randrange(2, 40))]
            temperature, top_p = rng.choice([0.0, 0.8]), rng.choice([1.0, 0.9])
            sampling = RowSampling(temperature=temperature, top_p=top_p, seed=row, num_logprobs=num_logprobs)
            new_rows.append(new_row(row, prompt, sampling=sampling))
            appends += [value for i in range(width) for value in (row, 0, 1 + row * width + i)]
        rows = [*active, *(new.row for new in new_rows)]
        counts = [1] * len(active) + [len(new.token_ids) // 4 for new in new_rows]
        runner.start(message(rows, counts, freed, new_rows, appends))
        num_started += 1
        if num_started == num_in_flight:
            finish()
            num_started -= 1
        active = rows
    for _ in range(num_started):
        finish()
    return outputs


@pytest.mark.parametrize(("family", "num_logprobs"), [("qwen3", -1), ("qwen3_moe", -1), ("qwen3", 2)])
def test_graphs_and_steps_in_flight_change_no_token(
    family: str, num_logprobs: int, device: torch.device, tmp_path: Path
) -> None:
    """With logprobs the host takes part in every step, so that none is in flight behind another."""
    folder, num_steps, ways = tiny_checkpoint(tmp_path, family), SIZES.num_steps, list(product((False, True), (1, 2)))
    if num_logprobs > 0:
        num_steps, ways = num_steps // 2, [(True, 1)]
    plain = drive(new_runner(folder, device, has_graphs=False, is_on_device=False), num_steps, 1, num_logprobs)
    for has_graphs, num_in_flight in ways:
        assert drive(new_runner(folder, device, has_graphs), num_steps, num_in_flight, num_logprobs) == plain


@torch.inference_mode()
def test_starting_a_step_never_waits_for_the_device(device: torch.device, tmp_path: Path) -> None:
    runner = new_runner(tiny_checkpoint(tmp_path, "qwen3"), device, has_graphs=True)
    for _ in range(2):  # compile and record for the rest
        drive(runner, 40, 2)
        runner.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drive(runner, 40, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
