"""Any order of adds, aborts, late answers and losses keeps every invariant and loses no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.tests.core.adversary import Adversary
from tokenloom.tests.core.random_operations import RandomOperations
from tokenloom.tests.support.today import seeds


@pytest.mark.parametrize("seed", seeds(8, 192))
def test_random_operations_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    RandomOperations(seed, tmp_path / "blocks").run(500)


@pytest.mark.parametrize("seed", seeds(8, 92))
def test_rows_may_bring_any_number_of_tokens_in_a_step(seed: int, tmp_path: Path) -> None:
    rng, most = random.Random(seed), 2 + seed % 5
    RandomOperations(seed, tmp_path / "blocks", num_new_tokens=lambda: rng.randrange(most + 1)).run(400)


@pytest.mark.parametrize("seed", seeds(9, 51))
def test_random_operations_with_drafts_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    adversary = Adversary(random.Random(seed), accuracy=(0.0, 0.8, 1.0)[seed % 3])
    RandomOperations(seed, tmp_path / "blocks", proposer=adversary).run(400)
