"""A row reads only the state of its own request, at its own position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tokenloom.kernels.contract import CacheGroup
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.workers.borrowed.test_model import load
from tokenloom.tests.workers.models.test_decoder import oracle, prompts_of
from tokenloom.tests.workers.paged_run import make_metadata
from tokenloom.workers.borrowed.model import BorrowedModel
from tokenloom.workers.step.model_step import StepContext

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recurrent_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2", seed=3)


class Rows:
    """Runs one row of a model a step, over blocks of its own."""

    def __init__(self, model: BorrowedModel) -> None:
        self.model = model
        (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
        self.kv_cache = torch.full(spec.shape(32), 1e3)

    def run(self, row: int | None, token_ids: list[int], start: int, stop: int) -> torch.Tensor:
        """Compute tokens [start, stop) in `row`; None: in a step that keeps no state. Return their logits."""
        blocks = list(range(1, 17)) if row else list(range(16, 32))
        metadata = make_metadata([(start, stop - start, blocks)], BLOCK_SIZE)
        rows = None if row is None else np.array([row], np.int32)
        with torch.inference_mode():
            inputs = torch.tensor(token_ids[start:stop]), torch.arange(stop - start)
            return self.model.forward_logits(*inputs, StepContext([CacheGroup(self.kv_cache, metadata)], rows=rows))[1]


def test_a_request_that_starts_again_in_any_row_forgets_what_the_row_held(folder: Path) -> None:
    tokens = prompts_of({"a": 12, "b": 12}, 270, seed=5)
    expected, rows = oracle(folder, tokens), Rows(load(folder))
    rows.run(0, tokens["a"], 0, 7)
    for name in ("b", "a"):  # the row is given to another request, then the first starts again
        rows.run(0, tokens[name], 0, 5)
        last = rows.run(0, tokens[name], 5, 12)
        torch.testing.assert_close(last, expected[name][5:], atol=1e-4, rtol=0)


def test_a_row_that_does_not_continue_its_state_is_an_error(folder: Path) -> None:
    tokens, rows = prompts_of({"a": 12}, 270, seed=5)["a"], Rows(load(folder))
    with pytest.raises(RuntimeError, match="row 3 continues at position 4, there is none"):
        rows.run(3, tokens, 4, 6)
    rows.run(3, tokens, 0, 4)
    with pytest.raises(RuntimeError, match="row 3 continues at position 6, its state is that after 4 tokens"):
        rows.run(3, tokens, 6, 8)


def test_a_step_of_a_start_keeps_no_state(folder: Path) -> None:
    tokens, rows = prompts_of({"a": 12}, 270, seed=5)["a"], Rows(load(folder))
    rows.run(None, tokens, 4, 6)
    with pytest.raises(RuntimeError, match="there is none"):
        rows.run(-1 % 4, tokens, 6, 8)


def test_a_model_counts_the_bytes_of_a_state(folder: Path) -> None:
    model = load(folder)
    assert model.rows.layers == ["model.layers.0.conv", "model.layers.2.conv"]
    assert model.rows.state_bytes == 2 * 64 * 3 * 4
