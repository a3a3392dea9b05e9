"""Checks answers under adapters with peft, which adds them unmerged to transformers' model in fp32."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tokenloom import RequestOutput, SamplingParams
from tokenloom.tests.support.adapters import peft_model
from tokenloom.tests.system.oracle import NEAR_TIE

BASE = ""  # in place of an adapter's name
TOLERANCE = 2e-4  # of a logprob


class AdapterOracle:
    """Recomputes the logprobs of each token of an answer, in one forward pass over prompt and answer."""

    def __init__(self, checkpoint: Path, adapters: Mapping[str, Path]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
            self._model = peft_model(checkpoint, dict(adapters))
        self._known: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # most schedules give the same answers

    def logprobs(self, adapter: str, token_ids: Sequence[int]) -> torch.Tensor:
        """Return [len(token_ids), vocab]: row i predicts the token after token i."""
        key = (adapter, tuple(token_ids))
        if key not in self._known:
            self._known[key] = self._compute(adapter, token_ids)
        return self._known[key]

    @torch.inference_mode()
    def _compute(self, adapter: str, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(token_ids)])
        if adapter == BASE:
            with self._model.disable_adapter():
                logits = self._model(ids).logits
        else:
            self._model.set_adapter(adapter)
            logits = self._model(ids).logits
        logprobs: torch.Tensor = logits[0].double().log_softmax(dim=-1)
        return logprobs

    def check(self, adapter: str, output: RequestOutput, params: SamplingParams) -> None:
        """Check that greedy tokens are the likeliest, up to near ties, and that the logprob of each token is right."""
        prompt = output.prompt_token_ids
        assert output.finished and len(output.outputs) == params.n and params.logprobs is not None
        for answer in output.outputs:
            ids = answer.token_ids
            assert len(ids) == params.max_tokens and answer.logprobs is not None
            rows = self.logprobs(adapter, [*prompt, *ids])[len(prompt) - 1 : -1]
            expected = rows[torch.arange(len(ids)), torch.tensor(ids)]
            found = torch.tensor([each[token].logprob for each, token in zip(answer.logprobs, ids, strict=True)])
            worst = (expected - found).abs().max()
            assert worst <= TOLERANCE, f"{adapter or 'base'}: a logprob differs by {worst:.6f}"
            if params.temperature == 0:
                misses = (rows.max(dim=-1).values - expected).max()
                assert misses <= NEAR_TIE, f"{adapter or 'base'}: a greedy token misses by {misses:.6f}"


def check_each_differs(tokens: Mapping[str, Sequence[int]]) -> None:
    """Check that all adapters and the base answer one prompt with different tokens: else no test here could fail."""
    names = list(tokens)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert list(tokens[name]) != list(tokens[other]), f"{name!r} and {other!r} give the same tokens"
