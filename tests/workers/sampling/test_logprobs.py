"""Logprobs, ranks and order are those of a sorted float64 log_softmax, on host and device, ties by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.tests.workers.history_model import VOCAB_SIZE, logits_after
from tokenloom.tests.workers.random_schedule import execute, message, new_row, new_runner
from tokenloom.workers.sampling.logprobs import LogprobTargets, ScoredToken, _score_on_device, score_tokens

F64 = npt.NDArray[np.float64]


def on_device(logits: Tensor, token_ids: npt.NDArray[np.int64], targets: Sequence[LogprobTargets]) -> list[ScoredToken]:
    return list(_score_on_device(logits, token_ids, targets))


def expected(logits: F64, token_id: int, k: int) -> tuple[int, list[int], F64]:
    """Rank, ids and logprobs by sorting the whole row."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    ids = [token_id, *order[:k].tolist()]
    return int(np.flatnonzero(order == token_id)[0]) + 1, ids, logprobs[ids]


@pytest.mark.parametrize("score", [score_tokens, on_device], ids=["host", "device"])
@pytest.mark.parametrize("vocab_size", [7, 1000, 9001])
def test_ranks_and_logprobs_equal_a_full_sort(vocab_size: int, score: Callable[..., list[ScoredToken]]) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 4, (40, vocab_size)).astype(np.float32)
    logits[20:] = logits[20:].round(1 if score is score_tokens else 3)  # topk of a device may choose among ties
    logits[5, : vocab_size // 2] = -np.inf
    token_ids = np.where(rng.random(40) < 0.5, logits.argmax(-1), rng.integers(vocab_size // 2, vocab_size, 40))
    others = rng.choice([0, 1, 5, 20, vocab_size], 40).tolist()
    others[::4] = [rng.integers(vocab_size // 2, vocab_size, 3) for _ in range(10)]
    scored = score(torch.from_numpy(logits), token_ids, others)
    for i, (token_id, wanted) in enumerate(zip(token_ids.tolist(), others, strict=True)):
        k = min(wanted, vocab_size) if isinstance(wanted, int) else vocab_size
        rank, ids, logprobs = expected(logits[i].astype(np.float64), token_id, k)
        if not isinstance(wanted, int):
            by_id = dict(zip(ids, logprobs.tolist(), strict=True))
            ids = [token_id, *wanted.tolist()]
            logprobs = np.array([by_id[each] for each in ids])
        assert scored[i].rank == rank
        assert scored[i].ids.tolist() == ids
        assert np.allclose(scored[i].logprobs, logprobs, atol=2e-5, rtol=1e-6)


def test_a_row_without_a_distribution_has_nan_logprobs() -> None:
    logits = torch.zeros(4, 50)
    logits[0, 3], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    scored = score_tokens(logits, np.array([3, 7, 0, 4]), [5, np.arange(5), 0, 5])
    for (_, ids, logprobs), num_top in zip(scored[:3], (5, 5, 0), strict=True):
        assert np.isnan(logprobs).all() and len(logprobs) == len(ids) == num_top + 1
    assert np.allclose(scored[3].logprobs, -np.log(50))


@pytest.mark.parametrize("chunk", [1, 2, 5, 17])
@pytest.mark.parametrize("start", [1, 2, 9, 16])
def test_prompt_logprobs_start_at_the_requested_token_under_any_chunking(chunk: int, start: int) -> None:
    prompt = np.random.default_rng(start).integers(0, VOCAB_SIZE, 17).tolist()
    runner = new_runner(logits_bytes=3 * 4 * VOCAB_SIZE)  # three rows at once
    scored = RowSampling(temperature=0.0, num_prompt_logprobs=3, prompt_logprobs_start=start)
    found: dict[int, tuple[int, list[int], F64]] = {}
    appends = [value for block in range(5) for value in (0, 0, block + 1)]
    for first in range(0, 17, chunk):
        count = min(chunk, 17 - first)
        news = {"new_rows": [new_row(0, prompt, 0, scored)], "appends": appends} if first == 0 else {}
        columns = execute(runner, message([0], [count], **news)).prompt_logprobs  # type: ignore[arg-type]
        if columns is not None:
            positions = np.frombuffer(columns.positions, np.int32)
            ids = np.frombuffer(columns.token_ids, np.int32).reshape(-1, 4)
            logprobs = np.frombuffer(columns.logprobs, np.float32).reshape(-1, 4)
            ranks = np.frombuffer(columns.ranks, np.int32)
            for i, position in enumerate(positions.tolist()):
                assert position not in found
                found[position] = int(ranks[i]), ids[i].tolist(), logprobs[i]
    assert sorted(found) == list(range(start, 17))
    for position, (rank, token_ids, values) in found.items():
        logits = logits_after(prompt[:position])[0].numpy().astype(np.float64)
        wanted_rank, wanted_ids, wanted_values = expected(logits, prompt[position], 3)
        assert (rank, token_ids) == (wanted_rank, wanted_ids)
        assert np.allclose(values, wanted_values, atol=2e-5)
