"""Drafts are those of a draft model that has computed all known tokens anew, wherever its keys came from; and those of
a head that has read the states of all tokens from a block on, which is the first one unless states were lost."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.workers import NewRow, RowSampling, SchedulerOutput
from tokenloom.ipc.spec.drafts.head_config import HeadConfig, HeadNames
from tokenloom.tests.support.today import seeds
from tokenloom.tests.workers.history_model import VOCAB_SIZE, HistoryModel, logits_after, logits_of, summary
from tokenloom.workers.features.drafting.drafter import Drafter
from tokenloom.workers.features.drafting.head_states import HeadStates
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.sampling.sampler import Sampler
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.model_step import StepContext
from tokenloom.workers.step.runner_feature import BegunStep
from tokenloom.workers.step.step_inputs import StepInputs

NUM_ROWS, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 3, 4, 40, 48
NAMES = HeadNames(layer="", projection="", embedding_norm="", state_norm="", norm="")
HEAD = HeadConfig(kind="mtp", depths=[], state_size=1, vocab_size=VOCAB_SIZE, names=NAMES)


class HistoryHead(HistoryModel):
    """A head whose cache holds the states that it was given. It guesses from these, in order, and a token."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[int, int] = {}  # by the slot of each row's last token: the first position that it saw

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        assert context.head_states is not None
        kv_cache, metadata = context.groups[0]
        slots = metadata.slots
        kv_cache[slots // BLOCK_SIZE, 0, 0, 0, slots % BLOCK_SIZE, 0] = context.head_states[:, 0]
        values = torch.zeros(len(token_ids), 1)
        for row, (start, end) in enumerate(pairwise(metadata.query_starts_host)):
            seen = kv_cache[metadata.block_tables[row].long(), 0, 0, 0, :, 0].flatten().long().tolist()
            for token in range(start, end):
                count = metadata.seq_lens_host[row] - (end - token) + 1
                values[token] = summary([*seen[:count], int(token_ids[token])])
            self.starts[int(slots[end - 1])] = int(metadata.positions[end - 1]) + 1 - count
        return values, self.compute_logits(values, logits_indices)


class Rows:
    """Rows of random texts, with blocks that are found by others, given back and used again."""

    def __init__(self, seed: int, *, has_head: bool, loses_states: bool = False) -> None:
        self.rng = random.Random(seed)
        self.batch = InputBatch(NUM_ROWS, MAX_LEN, BLOCK_SIZE, [NUM_BLOCKS], VOCAB_SIZE)
        cache = torch.zeros(NUM_BLOCKS, 1, 2, 1, BLOCK_SIZE, 1)
        most_tokens = self.rng.choice((5, 12, 200))
        self.head, states, self.loses_states = HistoryHead(), None, loses_states
        if has_head:
            num_kept = 70 if loses_states else 1000
            states = HeadStates(
                HEAD, lambda kept: kept, num_kept, NUM_ROWS, MAX_LEN + 1, torch.float32, torch.device("cpu")
            )
        model = self.head if has_head else HistoryModel()
        self.has_head = has_head
        self.drafter = Drafter(model, [cache], self.batch, ParallelGroup(), Sampler(), 1, most_tokens, states)
        self.num_computed: dict[int, int] = {}
        self.num_found: dict[int, int] = {}  # tokens in blocks of others
        self.num_whole = 0  # drafts of rows that the head saw from the begin
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
                self.num_computed[row] = self.num_found[row] = shared
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
        if self.has_head and self.texts:
            self.give_states()
        self.check(step, dict(limits))

    def give_states(self) -> None:
        """Give the drafter the states of the tokens that the step has computed, drafts that were wrong among them,
        unless a graph has kept none."""
        spans = [
            (row, self.num_computed[row], len(text) - 1 + self.rng.randrange(3)) for row, text in self.texts.items()
        ]
        rows, firsts, ends = (np.array(each) for each in zip(*spans, strict=True))
        self.num_computed |= {row: len(text) - 1 for row, text in self.texts.items()}
        positions = np.concatenate([np.arange(first, end) for _, first, end in spans])
        values = [
            summary(self.texts[row][: position + 1]) if position < len(self.texts[row]) - 1 else 7
            for row, *span in spans
            for position in range(*span)
        ]
        nothing = np.empty(0, np.int64)
        inputs = StepInputs(
            rows=rows.astype(np.int32),
            token_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            query_starts=np.append(0, np.cumsum(ends - firsts)).astype(np.int32),
            seq_lens=ends.astype(np.int32),
            groups=[],
            num_decode_rows=0,
            sampled_rows=nothing.astype(np.int32),
            sampled_positions=nothing,
            sampled_tokens=nothing,
        )
        hidden = torch.tensor(values, dtype=torch.float32)[:, None]
        if self.loses_states and self.rng.random() < 0.1:
            hidden = hidden[:0]
        self.drafter.read_hidden(hidden, self.drafter.prepare(inputs), BegunStep(lambda stage: None))

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
            seen = list[int]()
            if self.has_head:
                last = len(self.texts[row]) - 2
                start = self.head.starts[self.tables[row][last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE]
                assert start % BLOCK_SIZE == 0 and (start <= self.num_found[row] or self.loses_states)
                self.num_whole += start == 0
                seen = [summary(self.texts[row][: position + 1]) for position in range(start, last + 1)]
            for index, draft in enumerate(made):
                logits = logits_after(self.texts[row] + made[:index])[0]
                if self.has_head:
                    known = self.texts[row][-1] if index == 0 else made[index - 1]
                    value = summary([*seen, known])
                    logits, seen = logits_of(value), [*seen, value]
                assert draft == int(logits.argmax())
                assert abs(found[index] - float(logits.softmax(0)[draft])) < 1e-5
            self.drafts[row] = made
            self.num_made += count


@pytest.mark.parametrize("seed", seeds(10, 200))
def test_drafts_are_those_of_the_whole_text(seed: int) -> None:
    rows = Rows(seed, has_head=False)
    for _ in range(60):
        rows.step()
    assert rows.num_made > 60


@pytest.mark.parametrize("seed", seeds(10, 200))
def test_a_head_reads_the_states_of_all_tokens_from_a_block_on(seed: int) -> None:
    loses_states = seed % 2 == 0
    rows = Rows(seed, has_head=True, loses_states=loses_states)
    for _ in range(60):
        rows.step()
    assert rows.num_made > 60
    assert rows.num_whole > (10 if loses_states else 30)
