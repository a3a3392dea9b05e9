"""A thought has no more tokens than its budget, whatever comes before it, wherever the row is cut and resumed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tokenloom.ipc.messages.workers import NewRow, RowSampling
from tokenloom.tests.workers.history_model import VOCAB_SIZE
from tokenloom.tests.workers.random_schedule import RandomSchedule, Request, frame, new_runner
from tokenloom.workers.sampling.logits_processors import apply_processors
from tokenloom.workers.sampling.row_processors import RowProcessors
from tokenloom.workers.sampling.thinking import ThinkingBudget

MARKERS = [([3], [4]), ([5, 6, 7], [5, 8, 6, 7]), ([3], [8, 8, 9])]


def thought_lengths(tokens: Sequence[int], begin: list[int], end: list[int]) -> list[tuple[int, bool]]:
    """By one walk from the start: of each thought how many tokens it has, its end marker included, and whether that is
    there."""
    thoughts: list[tuple[int, bool]] = []
    begun_at: int | None = None
    for i in range(1, len(tokens) + 1):
        if begun_at is None:
            begun_at = i if list(tokens[:i][-len(begin) :]) == begin else None
        elif list(tokens[:i][-len(end) :]) == end:
            thoughts.append((i - begun_at, True))
            begun_at = None
    return thoughts if begun_at is None else [*thoughts, (len(tokens) - begun_at, False)]


def random_row(rng: np.random.Generator, markers: tuple[list[int], list[int]], count: int) -> list[int]:
    """Tokens among which markers, and parts of them, are frequent."""
    tokens: list[int] = []
    while len(tokens) < count:
        part = markers[rng.integers(2)]
        tokens += part if rng.random() < 0.3 else rng.integers(0, 12, 1).tolist()
    return tokens[:count]


@pytest.mark.parametrize("markers", MARKERS, ids=str)
@pytest.mark.parametrize("budget", [0, 1, 2, 7])
def test_reasoning_ends_within_its_budget_and_a_resumed_row_continues_unchanged(
    markers: tuple[list[int], list[int]], budget: int
) -> None:
    rng, (begin, end), num_forced = np.random.default_rng(budget), markers, 0
    for _ in range(40):
        prompt = random_row(rng, markers, int(rng.integers(1, 12)))
        sampling_metadata = random_row(rng, markers, 60)
        row = np.array([*prompt, *([0] * 60)], np.int32)
        thinking = ThinkingBudget(budget, begin, end, row[: len(prompt)])
        for i, wish in enumerate(sampling_metadata, len(prompt)):
            forced = thinking.forced()
            assert ThinkingBudget(budget, begin, end, row[:i]).forced() == forced
            num_forced += forced is not None
            row[i] = wish if forced is None else forced
            thinking.append(int(row[i]))
        of_prompt = thought_lengths(prompt, begin, end)
        has_open = bool(of_prompt) and not of_prompt[-1][1]
        thoughts = thought_lengths(row.tolist(), begin, end)[len(of_prompt) - has_open :]
        for number, (length, has_ended) in enumerate(thoughts):
            before = of_prompt[-1][0] if has_open and number == 0 else 0
            assert length <= max(budget, before) + len(end)
            assert has_ended or number == len(thoughts) - 1
    assert num_forced > 40


def test_behind_a_stop_no_reasoning_counts_and_a_resumed_row_continues_unchanged() -> None:
    rng, num_stopped = np.random.default_rng(0), 0
    for _ in range(60):
        outputs = random_row(rng, ([3], [4]), 40)
        stops = [[int(rng.integers(5, 12)), int(rng.integers(5, 12))], [int(rng.integers(5, 12))]]
        sampling = RowSampling(
            thought_markers=[frame(3), frame(4)],
            thinking_token_budget=2,
            constraint_begins=[frame(*stop) for stop in stops],
        )
        row = RowProcessors(
            NewRow(row=0, token_ids=frame(3), num_prompt_tokens=1, num_computed_tokens=0, sampling=sampling), [], 12
        )
        thinking = ThinkingBudget(2, [3], [4], np.array([3], np.int32))
        is_over = False
        for i, token_id in enumerate(outputs):
            row.append(token_id)
            thinking.append(token_id)
            is_over |= any(outputs[: i + 1][-len(stop) :] == stop for stop in stops)
            num_stopped += is_over and thinking.forced() is not None
            known = frame(3, *outputs[: i + 1])
            resumed = NewRow(row=0, token_ids=known, num_prompt_tokens=1, num_computed_tokens=0, sampling=sampling)
            for each in (row, RowProcessors(resumed, [], 12)):
                assert each.forced(torch.zeros(12)) == (None if is_over else thinking.forced())
    assert num_stopped > 40


@pytest.mark.parametrize("prompt", [[7, 7], [3, 4, 7]])
def test_without_a_begin_reasoning_begins_with_the_output(prompt: list[int]) -> None:
    outputs, thinking = [5, 6, 4, 5, 6, 6], ThinkingBudget(2, [], [4], np.array(prompt, np.int32), (), len(prompt))
    for i, forced in enumerate([None, 4, None, None, None, None]):
        thinking.append(outputs[i])
        row = np.array([*prompt, *outputs[: i + 1]], np.int32)
        assert thinking.forced() == ThinkingBudget(2, [], [4], row, (), len(prompt)).forced() == forced


def test_the_end_is_not_forced_where_a_grammar_does_not_allow_it() -> None:
    sampling = RowSampling(thought_markers=[frame(3), frame(4)], thinking_token_budget=0)
    new_row = NewRow(row=0, token_ids=frame(3), num_prompt_tokens=1, num_computed_tokens=0, sampling=sampling)
    row = RowProcessors(new_row, [], 12)
    logits = torch.zeros(1, 12)
    logits[0, 4] = -torch.inf
    apply_processors(logits, {0: row})
    assert logits[0].isfinite().sum() == 11, "the token that the mask leaves out stays out, all others stay"
    row.append(7)
    logits = torch.zeros(1, 12)
    apply_processors(logits, {0: row})
    assert logits[0].isfinite().nonzero().tolist() == [[4]]


class ThinkingSchedule(RandomSchedule):
    """All requests have a budget, and prompts that leave a thought open."""

    def _request(self) -> Request:
        request = super()._request()
        sampling = RowSampling(
            temperature=request.sampling.temperature,
            seed=request.sampling.seed,
            thought_markers=[frame(3), frame(8, 9)],
            thinking_token_budget=int(self.rng.integers(0, 9)),
            allowed_token_ids=frame(*range(10, VOCAB_SIZE)),  # which the end of a thought is not bound by
        )
        return Request([*(max(each, 10) for each in request.prompt[:20]), 3], sampling, min(request.limit, 16))


@pytest.mark.parametrize("seed", range(3))
def test_the_end_marker_is_forced_at_the_same_token_under_any_schedule(seed: int) -> None:
    schedule = ThinkingSchedule(seed)
    schedule.run(new_runner())
    for request in schedule.requests:
        budget = request.sampling.thinking_token_budget
        assert 8 not in request.outputs[:budget]
        assert request.outputs[budget : budget + 2] == [8, 9][: max(len(request.outputs) - budget, 0)]
        assert not {8, 9} & set(request.outputs[budget + 2 :])
