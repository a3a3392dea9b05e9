"""Steps of requests with and without adapters, which join, leave and follow each other on rows. Knows no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec

from tokenloom.ipc.messages.workers import NewRow, RowSampling
from tokenloom.tests.workers.random_schedule import message, new_row, sampled_by
from tokenloom.workers.model_runner import ModelRunner

BLOCKS_EACH = 5
GREEDY, COUNTED = RowSampling(temperature=0.0), RowSampling(temperature=0.0, num_logprobs=0)
REQUESTS = {  # row, slot, prompt
    "a": (0, 1, [5, 6, 7]),
    "b": (1, 2, [8, 9]),
    "none": (2, 0, [20, 21, 22, 23, 24, 25]),
    "a again": (1, 1, [30, 31, 32]),
    "late": (0, 0, [30, 31, 32]),
}
SCHEDULE: tuple[tuple[list[str], dict[str, int]], ...] = (  # requests that join, and tokens of those of the step
    (["a"], {"a": 3}),
    ([], {"a": 1}),
    (["b", "none"], {"a": 1, "b": 2, "none": 4}),  # a chunk of the prompt
    ([], {"a": 1, "b": 1, "none": 2}),
    ([], {"a": 1, "b": 1, "none": 1}),
    ([], {"a": 1, "b": 1, "none": 1}),
    ([], {"none": 1}),  # by a graph without adapters
    (["a again"], {"a again": 3, "a": 1}),
    (["late"], {"late": 3, "a again": 1}),  # on a row that had an adapter
    ([], {"late": 1, "a again": 1}),
    ([], {"late": 1, "none": 1}),
)


def admitting(name: str, block: int, sampling: RowSampling) -> tuple[NewRow, list[int]]:
    """Return a request's NewRow and its blocks, from `block` on."""
    row, slot, prompt = REQUESTS[name]
    admitted = msgspec.structs.replace(new_row(row, prompt, sampling=sampling), adapter_slot=slot)
    return admitted, [value for i in range(BLOCKS_EACH) for value in (row, 0, block + i)]


def drive(
    runner: ModelRunner,
    sampling: RowSampling,
    num_in_flight: int,
    watch: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[int]]:
    """Run the schedule; return the tokens of each request. `watch` surrounds the start of each step."""
    tokens: dict[str, list[int]] = {name: [] for name in REQUESTS}
    owners: dict[int, str] = {}
    started: deque[dict[int, str]] = deque()

    def finish() -> None:
        sampled, rows = sampled_by(runner.finish()), started.popleft()
        for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
            tokens[rows[row]].append(token)

    for joining, counts in SCHEDULE:
        made = [admitting(name, 1 + BLOCKS_EACH * list(REQUESTS).index(name), sampling) for name in joining]
        freed = [REQUESTS[name][0] for name in joining if REQUESTS[name][0] in owners]
        owners |= {REQUESTS[name][0]: name for name in joining}
        appends = [value for _, blocks in made for value in blocks]
        rows = [REQUESTS[name][0] for name in counts]
        step = message(rows, list(counts.values()), freed, [row for row, _ in made], appends)
        with watch():
            runner.start(step)
        started.append(dict(owners))
        if len(started) == num_in_flight:
            finish()
    while started:
        finish()
    return tokens
