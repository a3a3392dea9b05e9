"""n answers of one prompt: computed once, shared, each with the tokens of its seed; logprobs are told exactly once."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.core import EngineCoreOutputs, KeyLogprobs
from tokenloom.tests.core.fake_worker import FakeWorker, fake_logprob
from tokenloom.tests.core.harness import Harness, frontend_of, prompt_of


class GroupHarness(Harness):
    """Keeps the logprobs that each key was told."""

    def __init__(self, num_blocks: int = 64, **options: object) -> None:
        super().__init__(num_blocks, **options)
        self.told: dict[int, dict[int, tuple[int, float]]] = defaultdict(dict)
        self.prompt_told: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        take_outputs = self.core.take_outputs

        def listen() -> list[tuple[int, EngineCoreOutputs]]:
            outputs = take_outputs()
            for frontend_id, message in outputs:
                for key, position, token, logprob in entries(message.logprobs):
                    assert frontend_id == frontend_of(key) and position not in self.told[key], "a logprob came twice"
                    self.told[key][position] = token, logprob
                for key, position, token, logprob in entries(message.prompt_logprobs):
                    assert frontend_id == frontend_of(key)
                    self.prompt_told[key].append((position, token, logprob))
            return outputs

        self.core.take_outputs = listen  # type: ignore[method-assign]

    def check_told(self, key: int, num_had: int = 0) -> None:
        """Each output token from `num_had` on has its logprob."""
        prompt, tokens = self.prompts[key][0], self.tokens[key]
        expected = {i: (tokens[i], fake_logprob(len(prompt) + i, tokens[i], key)) for i in range(num_had, len(tokens))}
        assert self.told[key] == expected

    def check_prompt_told(self, key: int, start: int = 1) -> None:
        prompt = self.prompts[key][0]
        expected = [(i, prompt[i], fake_logprob(i, prompt[i])) for i in range(start, len(prompt))]
        assert self.prompt_told[key] == expected


def entries(columns: KeyLogprobs | None) -> list[tuple[int, int, int, float]]:
    if columns is None:
        return []
    keys, positions = decode_ids(columns.keys), decode_ids(columns.positions)
    ends = np.cumsum(np.frombuffer(columns.widths, np.int32))
    token_ids, logprobs = decode_ids(columns.token_ids), np.frombuffer(columns.logprobs, np.float32)
    assert ends[-1] == len(token_ids) == len(logprobs) and len(keys) == len(positions) == len(columns.ranks) // 4
    starts = [start for start, _ in pairwise([0, *ends.tolist()])]
    return [
        (key, position, token_ids[start], float(logprobs[start]))
        for key, position, start in zip(keys, positions, starts, strict=True)
    ]


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"steps_in_flight": 1}], ids=str)
@pytest.mark.parametrize("budget", [16, 2048])
def test_the_prompt_of_n_answers_is_computed_once(options: dict[str, object], budget: int) -> None:
    harness = GroupHarness(num_blocks=128, max_num_seqs=16, max_num_batched_tokens=budget, **options)
    harness.add(9, [9] * 100)  # its row is the first of theirs
    harness.run()
    before = harness.worker.num_computed_tokens
    prompt = prompt_of(random.Random(1), 62)
    harness.add(0, prompt, n=5)
    harness.run()
    for key in range(5):
        harness.check(key)
    assert harness.worker.num_computed_tokens - before == 62 + 4 * 2 + 5 * 7, "2 tokens stand in no full block"
    assert [harness.cached[key] for key in range(5)] == [0, 60, 60, 60, 60]


def test_after_a_loss_the_prompt_is_computed_once_more() -> None:
    harness = GroupHarness(num_blocks=128, max_num_seqs=16)
    prompt = prompt_of(random.Random(1), 62)
    harness.add(0, prompt, 30, n=5)
    while any(len(harness.tokens[key]) < 4 for key in range(5)):
        harness.turn()
    harness.core.lose_workers("a test")
    harness.worker = FakeWorker(128, 4)
    harness.core.gain_workers(harness.worker, 1)
    num_outputs = sum(len(harness.tokens[key]) for key in range(5))
    harness.run()
    for key in range(5):
        harness.check(key)
    assert harness.worker.num_computed_tokens == 62 + 4 * 2 + num_outputs + (5 * 30 - num_outputs - 5)


@pytest.mark.parametrize("ended", [[0], [1], [0, 1], [0, 1, 2], [3], [2, 0]])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_an_aborted_answer_keeps_no_other_from_its_end(ended: list[int], turns: int) -> None:
    harness = GroupHarness(max_num_seqs=4, max_num_batched_tokens=8)
    prompt = prompt_of(random.Random(3), 30)
    harness.add(0, prompt, prompt_logprobs=1, n=4)
    harness.turns(turns)
    harness.core.abort(0, ended)
    harness.run()
    for key in set(range(4)) - set(ended):
        harness.check(key)
    told = [entry for key in range(4) for entry in harness.prompt_told[key]]
    assert told == [(i, prompt[i], fake_logprob(i, prompt[i])) for i in range(1, 30)]


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8])
def test_an_aborted_parent_frees_everything(turns: int) -> None:
    harness = GroupHarness(max_num_seqs=4, max_num_batched_tokens=8)
    harness.add(0, prompt_of(random.Random(4), 30), n=6)
    harness.turns(turns)
    harness.core.abort(0, list(range(6)))
    assert harness.core.num_requests == 0 and not harness.core.scheduler.has_work()
    assert len(harness.core.scheduler.prompt_groups) == 0 and not harness.core.scheduler.prompt_groups.leaders
    harness.core.scheduler.check_invariants()
    harness.run()
    assert {finished.reason for finished in harness.finished.values()} == {"abort"}


def test_of_n_answers_the_one_that_kills_every_group_fails_alone() -> None:
    harness = GroupHarness(max_num_seqs=4)
    harness.add(0, prompt_of(random.Random(5), 30), n=4)
    harness.run_with_deadly_workers(lambda: harness.computes(2))
    assert harness.finished[2].reason == "error"
    for key in (0, 1, 3):
        harness.check(key)


@pytest.mark.parametrize("seed", range(4))
def test_prompt_groups_survive_preemption_and_lost_workers_and_deliver_each_logprob_once(seed: int) -> None:
    rng = random.Random(seed)
    harness = GroupHarness(num_blocks=24, max_num_seqs=8, max_num_batched_tokens=16)
    groups = [range(10 * group, 10 * group + rng.randrange(1, 5)) for group in range(6)]
    for keys in groups:
        prompt, max_tokens = prompt_of(rng, rng.randrange(2, 40)), rng.randrange(1, 30)
        harness.add(keys[0], prompt, max_tokens, n=len(keys), logprobs=1, prompt_logprobs=1)
    for turn in range(200):
        harness.turn(answers=rng.randrange(2))
        if turn in (30, 90):
            harness.worker.forget_rows()
            harness.core.lose_workers("lost")
            harness.core.gain_workers(harness.worker, 0)
    harness.run()
    assert harness.core.scheduler.num_preemptions > 4
    for keys in groups:
        harness.check_prompt_told(keys[0])
        for key in keys:
            harness.check(key)
            harness.check_told(key)


def test_a_resumed_prompt_group_continues_each_answer_and_delivers_only_missing_logprobs() -> None:
    whole = GroupHarness()
    prompt = prompt_of(random.Random(6), 21)
    whole.add(0, prompt, 12, n=3)
    whole.run()
    resumed = GroupHarness()
    had = {0: whole.tokens[0][:5], 1: [], 2: whole.tokens[2][:11]}
    resumed.add(0, prompt, 12, n=3, outputs=had, num_prompt_logprobs=9, logprobs=1, prompt_logprobs=1)
    resumed.run()
    resumed.check_prompt_told(0, start=9)
    for key in range(3):
        resumed.check(key)
        resumed.check_told(key, len(had[key]))


def test_prompt_logprobs_use_the_cache_only_before_the_first_that_is_wanted() -> None:
    harness = GroupHarness()
    prompt = prompt_of(random.Random(7), 33)
    harness.add(0, prompt)
    harness.run()
    harness.add(1, prompt, prompt_logprobs=1)
    harness.add(2, prompt, num_prompt_logprobs=18, prompt_logprobs=1)
    harness.add(3, prompt, num_prompt_logprobs=33, prompt_logprobs=1)
    harness.run()
    assert harness.cached == {0: 0, 1: 0, 2: 16, 3: 32}
    harness.check_prompt_told(1)
    harness.check_prompt_told(2, start=18)
    assert harness.prompt_told[3] == []


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_that_skip_the_prefix_cache_share_their_own_prompt(enable_prefix_caching: bool) -> None:
    prompt = list(range(5, 5 + 96))
    harness = GroupHarness(enable_prefix_caching=enable_prefix_caching)
    for keys in (range(1), range(10, 14)):
        harness.add(keys[0], prompt, 4, n=len(keys), skip_reading_prefix_cache=True)
        before = harness.core.stats.num_scheduled_tokens
        harness.run()
        num_prompt = harness.core.stats.num_scheduled_tokens - before - 3 * len(keys)
        assert len(prompt) <= num_prompt < len(prompt) + 16 * len(keys), "computed once, but for each one's last block"


def test_logprobs_come_for_the_tokens_that_count_and_no_others() -> None:
    harness = GroupHarness(num_new_tokens=lambda: 4, steps_in_flight=2)
    harness.add(0, [1, 2, 3], 6, logprobs=1)
    harness.run_to_the_end()
    harness.check_told(0)
