"""Checks greedy answers with transformers: one forward pass over prompt and answer, in fp32.

If each token of the answer has the highest logit given all tokens before it, the answer equals that of greedy
`generate`, by induction. A token may miss the maximum by at most NEAR_TIE (design §2); such near ties are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4
MAX_EXCUSES = 1e-3  # of all tokens


class GreedyOracle:
    """Checks answers and counts their near ties; `close` requires that these are rare enough."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.num_tokens = self.num_excuses = 0

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return [len(answer), vocab] logits: row i predicts answer[i]."""
        ids = torch.tensor([[*prompt, *answer]])
        logits: torch.Tensor = self._model(ids).logits[0, len(prompt) - 1 : -1]
        return logits.float()

    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        logits = self.logits(prompt, answer)
        best, found = logits.max(dim=-1).values, logits[torch.arange(len(answer)), torch.tensor(answer)]
        misses = best - found
        assert misses.max() <= NEAR_TIE, f"token {int(misses.argmax())} of {len(answer)} misses by {misses.max():.6f}"
        self.num_tokens += len(answer)
        self.num_excuses += int((logits.argmax(dim=-1) != torch.tensor(answer)).sum())

    def check_rough(self, prompt: Sequence[int], answer: Sequence[int], tolerance: float) -> None:
        """For bf16: check up to the first non-maximal token, which may miss by `tolerance` in log probability."""
        logprobs = self.logits(prompt, answer).log_softmax(dim=-1)
        misses = logprobs.max(dim=-1).values - logprobs[torch.arange(len(answer)), torch.tensor(answer)]
        wrong = (misses > 0).nonzero()
        if len(wrong):
            assert misses[wrong[0, 0]] <= tolerance, f"token {int(wrong[0, 0])} misses by {misses[wrong[0, 0]]:.3f}"

    def close(self) -> None:
        assert self.num_tokens and self.num_excuses <= max(MAX_EXCUSES * self.num_tokens, 1)
