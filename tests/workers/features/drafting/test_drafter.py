"""Drafts are those of a draft model that has computed all known tokens anew, wherever its keys came from."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.workers import NewRow, RowSampling, SchedulerOutput
from tokenloom.tests.support.today import seeds
from tokenloom.tests.workers.history_model import VOCAB_SIZE, HistoryModel, logits_after
from tokenloom.workers.features.drafting.drafter import Drafter
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.runner_feature import BegunStep

NUM_ROWS, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 3, 4, 40, 48


class Rows:
    """Rows of random texts, with blocks that are found by others, given back and used again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.batch = InputBatch(NUM_ROWS, MAX_LEN, BLOCK_SIZE, [NUM_BLOCKS], VOCAB_SIZE)
        cache = torch.zeros(NUM_BLOCKS, 1, 2, 1, BLOCK_SIZE, 1)
        most_tokens = self.rng.choice((5, 12, 200))
        self.drafter = Drafter(HistoryModel(), [cache], self.batch, ParallelGroup(), Sampler(), 1, most_tokens)
        self.texts: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.kept: list[tuple[list[int], list[int]]] = []  # text and table of rows that have ended
        self.drafts: dict[int, list[int]] = {}
        self.num_made = 0

    def token(self) -> int:
        return self.rng.randrange(VOCAB_SIZE)

    def take_blocks(self, row: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """Give a row blocks for as many tokens; return their triples in a step's message."""
        held = {block for table in self.tables.values() for block in table}
        appends = []
        while len(self.tables[row]) * BLOCK_SIZE < num_tokens:
            block = self.rng.choice([each for each in range(1, NUM_BLOCKS) if each not in held])
            self.kept = [(text, table) for text, table in self.kept if block not in table]
            held.add(block)
            self.tables[row].append(block)
            appends.append((row, 0, block))
        return appends

    def step(self) -> None:
        freed, new_rows, appends = list[int](), list[NewRow](), list[tuple[int, int, int]]()
        for row in list(self.texts):
            if self.rng.random() < 0.15 or len(self.texts[row]) > MAX_LEN - 12:
                freed.append(row)
                self.kept.append((self.texts.pop(row), self.tables.pop(row)))
                self.drafts.pop(row, None)
        for row in set(range(NUM_ROWS)) - self.texts.keys():
            if self.rng.random() < 0.6:
                text, table = self.rng.choice(self.kept or [([], [])])
                num_blocks = self.rng.randrange(max(len(text) - 1, 0) // BLOCK_SIZE + 1)
                shared = num_blocks * BLOCK_SIZE
                self.tables[row] = table[:num_blocks]
                self.texts[row] = text[:shared] + [self.token() for _ in range(self.rng.randrange(1, 6))]
                ids = encode_ids(self.texts[row])
                new = NewRow(
                    row=row,
                    token_ids=ids,
                    num_prompt_tokens=len(self.texts[row]),
                    num_computed_tokens=shared,
                    sampling=RowSampling(temperature=0.0),
                )
                new_rows.append(new)
                appends += [(row, 0, block) for block in self.tables[row]]
        came = {row: self.next_tokens(row) for row in self.texts}
        for row, tokens in came.items():
            num_tokens = len(self.texts[row]) + len(tokens) + self.rng.randrange(6)
            appends += self.take_blocks(row, min(num_tokens, MAX_LEN))
        limits = [(row, self.rng.randrange(1, 6)) for row in self.texts if self.rng.random() < 0.7]
        step = SchedulerOutput(
            step=1,
            core_epoch=1,
            generation=1,
            rows=b"",
            counts=b"",
            freed_rows=encode_ids(freed),
            new_rows=new_rows,
            block_appends=encode_ids(number for each in appends for number in each),
            draft_limits=encode_ids(number for each in limits for number in each),
        )
        self.batch.free(np.array(freed, np.int32))
        for new in new_rows:
            self.batch.admit(new)
        self.drafter.update(step)
        self.batch.append_blocks(np.array(appends, np.int32).reshape(-1, 3))
        for row, tokens in came.items():
            self.texts[row] += tokens
            for token in tokens:
                self.batch.append_tokens(np.array([row], np.int32), np.array([token]))
        self.check(step, dict(limits))

    def next_tokens(self, row: int) -> list[int]:
        """Return the tokens that a step brings: some of the drafts, then another one."""
        made = self.drafts.get(row, [])
        return [*made[: self.rng.randrange(len(made) + 1)], self.token()]

    def check(self, step: SchedulerOutput, limits: dict[int, int]) -> None:
        begun = BegunStep(lambda stage: None)
        self.drafter.follow(step, begun)
        if begun.draft_work is None:
            assert not limits
            return
        frame = np.frombuffer(begun.draft_work.drafts, np.int32).tolist()
        chances = np.frombuffer(begun.draft_work.chances, np.float32).tolist()
        while frame:
            row, count, *frame = frame
            made, frame = frame[:count], frame[count:]
            found, chances = chances[:count], chances[count:]
            assert 1 <= count <= limits[row]
            for index, draft in enumerate(made):
                logits = logits_after(self.texts[row] + made[:index])[0]
                assert draft == int(logits.argmax())
                assert abs(found[index] - float(logits.softmax(0)[draft])) < 1e-5
            self.drafts[row] = made
            self.num_made += count


@pytest.mark.parametrize("seed", seeds(10, 200))
def test_drafts_are_those_of_the_whole_text(seed: int) -> None:
    rows = Rows(seed)
    for _ in range(60):
        rows.step()
    assert rows.num_made > 60
