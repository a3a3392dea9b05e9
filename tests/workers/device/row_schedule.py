"""Schedules of requests that join, leave and follow each other on rows. Knows no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import msgspec

from tokenloom.ipc.messages.workers import NewRow, RowSampling
from tokenloom.tests.workers.random_schedule import message, new_row, sampled_by
from tokenloom.workers.model_runner import ModelRunner

BLOCKS_EACH = 5
GREEDY, COUNTED = RowSampling(temperature=0.0), RowSampling(temperature=0.0, num_logprobs=0)
DRAWN = RowSampling(temperature=0.8, seed=11)


class Request(NamedTuple):
    row: int
    prompt: list[int]
    slot: int = 0  # of an adapter
    sampling: RowSampling = GREEDY


Step: TypeAlias = tuple[list[str], dict[str, int]]  # requests that join, and tokens of those of the step


class Schedule(NamedTuple):
    requests: dict[str, Request]
    steps: list[Step]


WITH_ADAPTERS = Schedule(
    {
        "a": Request(0, [5, 6, 7], 1),
        "b": Request(1, [8, 9], 2),
        "none": Request(2, [20, 21, 22, 23, 24, 25]),
        "a again": Request(1, [30, 31, 32], 1),
        "late": Request(0, [30, 31, 32]),
    },
    [
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
    ],
)
OF_RANKS = Schedule(
    {
        "a": Request(0, [5, 6, 7]),
        "b": Request(1, [8, 9], sampling=DRAWN),
        "c": Request(2, [20, 21, 22, 23, 24, 25], sampling=DRAWN),
        "counted": Request(1, [30, 31], sampling=COUNTED),  # the host takes part in its steps
    },
    [
        (["a", "b"], {"a": 3, "b": 2}),
        ([], {"a": 1, "b": 1}),
        (["c"], {"a": 1, "b": 1, "c": 4}),
        ([], {"a": 1, "b": 1, "c": 2}),
        (["counted"], {"a": 1, "c": 1, "counted": 2}),
        ([], {"a": 1, "c": 1, "counted": 1}),
        ([], {"a": 1, "c": 1}),
    ],
)


def admitting(request: Request, block: int, sampling: RowSampling) -> tuple[NewRow, list[int]]:
    """Return a request's NewRow and its blocks, from `block` on."""
    admitted = msgspec.structs.replace(
        new_row(request.row, request.prompt, sampling=sampling), adapter_slot=request.slot
    )
    return admitted, [value for i in range(BLOCKS_EACH) for value in (request.row, 0, block + i)]


def drive(
    runner: ModelRunner,
    schedule: Schedule,
    num_in_flight: int,
    sampling: RowSampling | None = None,
    watch: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[int]]:
    """Run the schedule; return the tokens of each request. `sampling`: of all, in place of their own. `watch` surrounds
    the start of each step that needs nothing from the host."""
    requests = schedule.requests
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    owners: dict[int, str] = {}
    started: deque[dict[int, str]] = deque()

    def finish() -> None:
        sampled, rows = sampled_by(runner.finish()), started.popleft()
        for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
            tokens[rows[row]].append(token)

    def finish_all() -> None:
        while started:
            finish()

    for joining, counts in schedule.steps:
        blocks = [1 + BLOCKS_EACH * list(requests).index(name) for name in joining]
        made = [
            admitting(requests[name], block, sampling or requests[name].sampling)
            for name, block in zip(joining, blocks, strict=True)
        ]
        freed = [requests[name].row for name in joining if requests[name].row in owners]
        owners |= {requests[name].row: name for name in joining}
        appends = [value for _, appended in made for value in appended]
        rows = [requests[name].row for name in counts]
        step = message(rows, list(counts.values()), freed, [row for row, _ in made], appends)
        is_counted = any((sampling or requests[name].sampling).num_logprobs >= 0 for name in counts)
        with nullcontext() if is_counted else watch():
            runner.start(step, finish_all=finish_all)
        started.append(dict(owners))
        if len(started) == num_in_flight:
            finish()
    finish_all()
    return tokens
