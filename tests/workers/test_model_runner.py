"""Under any schedule each row gets the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.tests.support.today import some, some_pairs
from tokenloom.tests.workers.history_model import ONE_GROUP, VOCAB_SIZE, HistoryModel
from tokenloom.tests.workers.random_schedule import (
    RandomSchedule,
    Sampled,
    execute,
    expected_tokens,
    frame,
    message,
    new_row,
    new_runner,
)
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.machine.parallel import ParallelGroup


@pytest.mark.parametrize(("seed", "accuracy"), some_pairs(range(4), [None, 0.0, 0.7, 1.0], every=2))
@pytest.mark.parametrize("windows", some([(ONE_GROUP,), ((None, 6, 17),)], 1))
def test_tokens_do_not_depend_on_chunks_batches_preemption_or_drafts(
    seed: int, accuracy: float | None, windows: Sequence[int | None]
) -> None:
    schedule, runner = RandomSchedule(seed, accuracy, windows=windows), new_runner(windows=windows)
    schedule.run(runner)
    schedule.check()
    assert (schedule.num_freed > 0) == (len(windows) > 1)
    if accuracy is None:
        return
    assert schedule.num_drafts > 100
    assert (schedule.num_accepted > 50) == (accuracy > 0)
    assert (schedule.num_accepted < schedule.num_drafts) == (accuracy < 1)


RULES = {
    "penalties": RowSampling(temperature=0.9, seed=5, repetition_penalty=1.5, presence_penalty=0.4),
    "bad words": RowSampling(temperature=0.9, seed=5, bad_words=[frame(3, 4), frame(9)], top_k=40),
    "min_tokens": RowSampling(temperature=1.5, seed=5, min_tokens=9, stop_token_ids=frame(*range(0, 211, 2))),
    "trace": RowSampling(temperature=1.5, seed=5, trace_token_ids=frame(*range(40, 52))),
    "logprobs": RowSampling(temperature=0.9, seed=5, num_logprobs=2),
    "all": RowSampling(temperature=0.9, seed=5, frequency_penalty=0.3, bad_words=[frame(3, 4)], num_logprobs=1),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("wrong_at", [None, 0, 3])
def test_each_draft_is_verified_by_the_rules_after_the_drafts_before_it(rules: str, wrong_at: int | None) -> None:
    row, blocks = new_row(0, [7, 8, 9], 0, RULES[rules]), [each for block in range(1, 9) for each in (0, 0, block)]
    first = message([0], [3], new_rows=[row], appends=blocks)
    plain, drafted = new_runner(), new_runner()
    expected = [execute(plain, first), *(execute(plain, message([0], [1])) for _ in range(12))]
    tokens = [each.token_ids[0] for each in expected]
    execute(drafted, first)
    found = list[Sampled]()
    while (start := 1 + sum(len(each.token_ids) for each in found)) < 9:
        drafts = tokens[start : start + 4]
        if wrong_at is not None:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB_SIZE
        found.append(execute(drafted, message([0], [5], drafts=[0, 4, *drafts])))
        assert len(found[-1].token_ids) == 5 if wrong_at is None else wrong_at + 1
    told = [token for each in found for token in each.token_ids]
    assert told == tokens[1 : 1 + len(told)]
    assert _logprobs(found) == _logprobs(expected[1:])[: len(_logprobs(found))]
    assert bool(_logprobs(found)) == (RULES[rules].num_logprobs >= 0)


def _logprobs(outputs: list[Sampled]) -> list[tuple[bytes, ...]]:
    """Return position, ranks, ids and logprobs of each token."""
    found = []
    for columns in (each.logprobs for each in outputs if each.logprobs is not None):
        width = int.from_bytes(columns.widths[:4], "little") * 4
        for i in range(len(columns.rows) // 4):
            frames = (columns.positions, columns.ranks)
            own = (columns.token_ids, columns.logprobs)
            found.append((*(f[4 * i : 4 * i + 4] for f in frames), *(f[width * i : width * (i + 1)] for f in own)))
    return found


@pytest.mark.parametrize(
    ("drafts", "count", "reason"),
    [
        ([0, 2, 5], 3, "has 2 drafts, of which there are 1"),
        ([0, 0], 1, "has 0 drafts"),
        ([0, 1, VOCAB_SIZE], 2, "ids are"),
        ([0, 1, -1], 2, "ids are"),
        ([0, 1, 5, 0, 1, 5], 3, "has 1 drafts"),
        ([1, 1, 5], 1, "are not in the step"),
        ([0, 1, 5], 1, "do not follow its last known token"),
        ([0, 1, 5], 3, "scheduled up to token 6, it has 5 known tokens"),
        ([0, 9, *range(9)], 10, "it has 12 slots"),
    ],
)
def test_drafts_that_contradict_the_rows_are_refused(drafts: list[int], count: int, reason: str) -> None:
    runner = new_runner()
    first = [new_row(0, [1, 2, 3]), new_row(1, [1, 2, 3])]
    execute(runner, message([0, 1], [3, 3], new_rows=first, appends=[0, 0, 1, 0, 0, 2, 0, 0, 4, 1, 0, 3]))
    with pytest.raises(ProtocolError, match=reason):
        runner.execute(message([0], [count], drafts=drafts))


def test_forced_tokens_are_computed_in_one_step_and_the_next_token_follows_them() -> None:
    runner, sampling = new_runner(), RowSampling(temperature=0.9, seed=5, repetition_penalty=1.5)
    blocks = [each for block in range(1, 9) for each in (3, 0, block)]
    first = execute(runner, message([3], [3], new_rows=[new_row(3, [7, 8, 9], 0, sampling)], appends=blocks))
    history, forced = [7, 8, 9, int(first.token_ids[0])], [4, 4, 11]
    second = execute(runner, message([3], [4], forced=[3, 3, *forced]))
    alone = new_runner()
    row = new_row(0, [*history, *forced], 0, sampling, num_prompt=3)
    expected = execute(alone, message([0], [7], new_rows=[row], appends=[0, 0, 1, 0, 0, 2]))
    assert second.token_ids == expected.token_ids


def test_cached_blocks_are_read_and_not_computed_again() -> None:
    runner = new_runner()
    prompt = list(range(10))
    execute(runner, message([0], [10], new_rows=[new_row(0, prompt)], appends=[0, 0, 3, 0, 0, 4, 0, 0, 5]))
    other = [*prompt[:8], 77, 78]
    appends = [1, 0, 3, 1, 0, 4, 1, 0, 6]
    answer = execute(runner, message([1], [2], new_rows=[new_row(1, other, computed=8)], appends=appends))
    assert answer.token_ids == expected_tokens(other, RowSampling(temperature=0.0), 1)


def test_block_appends_must_be_triples() -> None:
    with pytest.raises(ProtocolError, match="tuples of 3"):
        execute(new_runner(), message(new_rows=[new_row(0, [1])], appends=[0, 0, 1, 0]))


class SilentModel(HistoryModel):
    """Ranks other than 0 see no logits."""

    def compute_logits(self, hidden: Tensor, indices: Tensor | None = None) -> Tensor:
        return torch.empty(0, VOCAB_SIZE)


def test_every_rank_stores_the_tokens_that_rank_0_sampled() -> None:
    sampling = RowSampling(seed=4)
    right = expected_tokens([1, 2], sampling, 6)
    steps = [message([0], [2], new_rows=[new_row(0, [1, 2], sampling=sampling)], appends=[0, 0, 1])]
    steps += [message([0], [1]), message([0], [1])]
    steps += [message([0], [4], drafts=[0, 3, right[3], right[4], right[5] + 1], appends=[0, 0, 2])]

    def run(group: ParallelGroup) -> list[int]:
        runner = new_runner(SilentModel() if group.rank else HistoryModel(), group)
        for step in steps:
            runner.execute(step)
        return runner._batch.token_ids(0)

    assert run_ranks(2, run) == [[1, 2, *right]] * 2
