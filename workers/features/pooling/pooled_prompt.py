"""PooledPrompt: one prompt that is pooled, and what is kept of the hidden states of its chunks so far."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ....ipc.messages.workers import NewRow
from ....ipc.params.pooling_params import PoolingMethod, PoolingParams


class PooledPrompt:
    """Owner of the sums of a prompt, in float32; of all hidden states for a task by tokens. It keeps no view of a
    step's hidden states, which the next step overwrites."""

    def __init__(self, new_row: NewRow, params: PoolingParams, methods: list[PoolingMethod]) -> None:
        """`methods`: the model's own, for params without one."""
        self.params = params
        self.token_ids = np.frombuffer(new_row.token_ids, np.int32)
        self._methods = methods if params.method is None else [params.method]
        self._parts: list[Tensor | None] = [None] * len(self._methods)
        self._states: list[Tensor] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def add(self, chunk: Tensor, first: int) -> None:
        """Add the hidden states [n, hidden_size] of the tokens from position `first` on."""
        if self.params.is_token_level:
            self._states.append(chunk.to(torch.float32, copy=True))
            return
        self._parts = [
            _added(method, part, chunk, first) for method, part in zip(self._methods, self._parts, strict=True)
        ]

    @property
    def states(self) -> Tensor:
        """The hidden states [num_tokens, hidden_size] of a task by tokens, whose prompt is complete."""
        return self._states[0] if len(self._states) == 1 else torch.cat(self._states)

    @property
    def vector(self) -> Tensor:
        """The vector [inputs] of a complete prompt: those of its methods, joined."""
        vectors = []
        for method, part in zip(self._methods, self._parts, strict=True):
            assert part is not None
            vectors.append(_finished(method, part, self.num_tokens))
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _added(method: PoolingMethod, part: Tensor | None, chunk: Tensor, first: int) -> Tensor:
    if method == "last":
        return chunk[-1].float()
    if method == "cls":
        return chunk[0].to(torch.float32, copy=True) if part is None else part
    if method == "max":
        largest: Tensor = chunk.amax(0).float()
        return largest if part is None else torch.maximum(part, largest)
    if method == "weighted":
        weights = torch.arange(first + 1, first + 1 + len(chunk), device=chunk.device, dtype=torch.float32)
        total = torch.mv(chunk.float().T, weights)
    else:
        total = chunk.sum(0, dtype=torch.float32)
    return total if part is None else part + total


def _finished(method: PoolingMethod, part: Tensor, num_tokens: int) -> Tensor:
    if method == "mean":
        return part / num_tokens
    if method == "mean_sqrt":
        return part / math.sqrt(num_tokens)
    if method == "weighted":
        return part / (num_tokens * (num_tokens + 1) / 2)
    return part
