"""Prompts of an encoder are computed whole, each in one step, beside others within the budget, and hold no blocks."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import numpy as np
import pytest

from tokenloom.core.engine import EngineCore
from tokenloom.core.features.new import Surroundings
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import BulkArray
from tokenloom.ipc.messages.core import Finished
from tokenloom.ipc.messages.workers import ModelRunnerOutput, Pooled, SchedulerOutput, TokenMask
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.tests.core.features.grammar.fake_grammar_helper import FakeGrammarHelper
from tokenloom.tests.core.harness import make_spec, new_message
from tokenloom.tests.support.today import seeds

BUDGET = 64


class EncoderWorker:
    """An Executor that checks each step and answers it with the sum of each prompt's tokens."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._tokens: dict[int, list[int]] = {}
        self.sent: deque[SchedulerOutput] = deque()
        self.sizes: list[int] = []  # tokens of each step

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        assert isinstance(message, SchedulerOutput)
        self.sent.append(message)

    def answer(self) -> ModelRunnerOutput:
        step = self.sent.popleft()
        assert not step.block_appends and not step.block_frees
        for row in decode_ids(step.freed_rows):
            del self._tokens[row]
        for new in step.new_rows:
            assert new.row not in self._tokens and not new.num_computed_tokens
            self._tokens[new.row] = list(decode_ids(new.token_ids))
        rows, counts = list(decode_ids(step.rows)), list(decode_ids(step.counts))
        assert set(rows) == {new.row for new in step.new_rows}, "a row is computed in the step that brings it"
        assert counts == [len(self._tokens[row]) for row in rows], "a prompt is computed whole"
        assert sum(counts) <= self._budget
        self.sizes.append(sum(counts))
        pooled = [Pooled(row=row, vector=vector_of(self._tokens[row])) for row in rows]
        empty = {"rows": b"", "counts": b"", "token_ids": b""}
        return ModelRunnerOutput(step=step.step, core_epoch=0, generation=0, pooled=pooled, **empty)


def vector_of(tokens: list[int]) -> BulkArray:
    return BulkArray(dtype="float32", shape=[1], data=np.array([sum(tokens)], np.float32).tobytes())


def new_core(**options: object) -> tuple[EngineCore, EncoderWorker]:
    spec = make_spec(**{"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": BUDGET, **options})
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, is_encoder=True))
    worker = EncoderWorker(spec.max_num_batched_tokens)
    surroundings = Surroundings(FakeGrammarHelper(), None, None)
    return EngineCore(spec, PoolShape(2, 1, (1,)), worker, surroundings), worker


def add(core: EngineCore, key: int, prompt: list[int]) -> None:
    params, pooling = SamplingParams(max_tokens=1), PoolingParams(method="mean")
    core.add_request(0, new_message({key: []}, prompt, params, pooling=pooling))


def finished(core: EngineCore) -> dict[int, Finished]:
    return {each.key: each for _, outputs in core.take_outputs() for each in outputs.finished}


def run(core: EngineCore, worker: EncoderWorker) -> dict[int, Finished]:
    """Run until all requests have ended; return their ends."""
    found = finished(core)
    while core.num_requests or worker.sent:
        core.step()
        core.on_result(worker.answer())
        core.scheduler.check_invariants()
        found |= finished(core)
    return found


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_each_prompt_is_computed_once_as_a_whole(seed: int) -> None:
    rng = random.Random(seed)
    core, worker = new_core(steps_in_flight=rng.choice([1, 2]), max_num_seqs=rng.choice([1, 3, 16]))
    prompts = {key: [rng.randrange(99) for _ in range(rng.choice([1, 2, 4, 17, 40, BUDGET]))] for key in range(40)}
    found: dict[int, Finished] = {}
    for key, prompt in prompts.items():
        add(core, key, prompt)
        if rng.random() < 0.3:
            core.step()
            found |= finished(core)
    found |= run(core, worker)
    assert {key: each.vector for key, each in found.items()} == {key: vector_of(ids) for key, ids in prompts.items()}
    assert sum(worker.sizes) == sum(map(len, prompts.values()))


def test_short_prompts_fill_the_step_that_a_long_one_does_not_fit() -> None:
    core, worker = new_core()
    for key, length in enumerate([40, 50, 20, 4, 14]):
        add(core, key, [1] * length)
    run(core, worker)
    assert worker.sizes == [64, 64]


def test_a_prompt_above_the_budget_of_a_step_is_refused_with_numbers() -> None:
    core, worker = new_core()
    add(core, 0, [1] * (BUDGET + 1))
    (end,) = finished(core).values()
    assert end.error is not None and end.error.kind == "request"
    assert f"{BUDGET + 1} prompt tokens" in end.error.message and f"at most {BUDGET}" in end.error.message
    assert not core.scheduler.has_work() and not worker.sent


def test_lost_workers_cost_no_request() -> None:
    core, _ = new_core()
    for key in range(6):
        add(core, key, [key] * 30)
    core.step()
    core.lose_workers("a test")
    renewed = EncoderWorker(BUDGET)
    core.gain_workers(renewed, 0)
    assert len(run(core, renewed)) == 6
