"""Reference logprobs of transformers: one fp32 forward pass, a sort of each row, and a strict checker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tokenloom.frontend.forms.logprobs import Logprob, TokenLogprobs

TOLERANCE = 1e-4  # of a logprob
TIE = 1e-5  # tokens closer than this may be in either order


class LogprobOracle:
    """Checks the dicts of a prompt or an answer against the logprobs of the whole vocabulary."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return [len(token_ids), vocab] float64: row i predicts the token after token i."""
        return self._model(torch.tensor([list(token_ids)])).logits[0].double().log_softmax(dim=-1)


def check_token(expected: torch.Tensor, token_id: int, found: TokenLogprobs, num_top: int) -> None:
    """Check that `found` holds the token and the likeliest ones, in order, with ranks. `expected`: [vocab]."""
    ids = list(found)
    assert ids[0] == token_id, f"the first entry is {ids[0]}, the token is {token_id}"
    others = ids[1:]
    assert len(ids) in (num_top + 1, max(num_top, 1)), f"{len(ids)} entries for top {num_top}"
    for each, logprob in found.items():
        _check_entry(expected, each, logprob)
    ranks = [found[each].rank for each in others]
    wanted = [rank for rank in range(1, num_top + 1) if rank != found[token_id].rank or len(others) == num_top]
    assert ranks == wanted, f"the ranks are {ranks}, they should be {wanted}"
    values = [found[each].logprob for each in others]
    assert values == sorted(values, reverse=True), "not in descending order"
    if num_top:
        least = expected.topk(num_top).values[-1]
        assert all(expected[each] >= least - TIE for each in others), "one of the likeliest is missing"


def _check_entry(expected: torch.Tensor, token_id: int, found: Logprob) -> None:
    value = float(expected[token_id])
    assert math.isfinite(found.logprob), f"token {token_id} has the logprob {found.logprob}"
    assert abs(found.logprob - value) <= TOLERANCE, f"token {token_id}: {found.logprob}, expected {value}"
    surely_before = int((expected > value + TIE).sum())
    maybe_before = int((expected > value - TIE).sum())
    assert surely_before + 1 <= found.rank <= max(maybe_before, 1), (
        f"token {token_id} has rank {found.rank}, expected {surely_before + 1} to {maybe_before}"
    )
