"""A schedule that each rank of a group runs on a fake device, with two steps in flight."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.tests.workers.device.fake_device import FakeRecorder, NoWaiting, device_ops, new_runner
from tokenloom.tests.workers.paged_run import CPU, load
from tokenloom.tests.workers.random_schedule import BLOCK_SIZE, NUM_BLOCKS, message, new_row, sampled_by
from tokenloom.workers.parallel import ParallelGroup

NUM_IN_FLIGHT = 2
WITH_LOGPROBS = 3  # the request for which the host takes part in its steps

GREEDY, DRAWN = RowSampling(temperature=0.0), RowSampling(temperature=0.8, seed=11)
COUNTED = RowSampling(temperature=0.0, num_logprobs=0)
ADMISSIONS = {  # by step: request, row, prompt, how it samples
    0: [(0, 0, [5, 6, 7], GREEDY), (1, 1, [8, 9], DRAWN)],
    2: [(2, 2, [20, 21, 22, 23, 24, 25], DRAWN)],
    4: [(WITH_LOGPROBS, 1, [30, 31], COUNTED)],
}
STEPS = (  # freed rows, rows, tokens of each
    ([], [0, 1], [3, 2]),
    ([], [0, 1], [1, 1]),
    ([], [0, 1, 2], [1, 1, 4]),  # a chunk
    ([], [0, 1, 2], [1, 1, 2]),
    ([1], [0, 2, 1], [1, 1, 2]),
    ([], [0, 2, 1], [1, 1, 1]),
    ([1], [0, 2], [1, 1]),
)


def drive(model_folder: Path, group: ParallelGroup) -> dict[int, list[int]]:
    """Tokens of each request, two steps in flight, of which none waits for the device to begin."""
    model = load(model_folder, group=group, ops=device_ops())
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    recorder = FakeRecorder()
    runner = new_runner(recorder, model, spec.allocate(NUM_BLOCKS, CPU), group)
    outputs: dict[int, list[int]] = {}
    requests: dict[int, int] = {}  # by row
    started: list[dict[int, int]] = []  # of each step that is not finished, as they were then

    def finish() -> None:
        sampled, owners = sampled_by(runner.finish()), started.pop(0)
        for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
            outputs.setdefault(owners[row], []).append(token)

    def finish_all() -> None:
        while started:
            finish()

    for number, (freed, rows, counts) in enumerate(STEPS):
        admitted = ADMISSIONS.get(number, [])
        requests |= {row: request for request, row, _, _ in admitted}
        appends = [
            value for request, row, _, _ in admitted for i in range(5) for value in (row, 0, 1 + 5 * request + i)
        ]
        new_rows = [new_row(row, prompt, sampling=sampling) for _, row, prompt, sampling in admitted]
        step = message(rows, counts, freed, new_rows, appends)
        if WITH_LOGPROBS in (requests[row] for row in rows):
            runner.start(step, finish_all=finish_all)
        else:
            with NoWaiting():
                runner.start(step)
        started.append(dict(requests))
        if len(started) == NUM_IN_FLIGHT:
            finish()
    finish_all()
    assert recorder.num_replays
    return outputs
