"""PoolingLayers: the layers behind the hidden states, which make vectors and scores, with their weights in float32.

Rank 0 holds them whole: they are small. Knows no rows and no requests' ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ....ipc.params.pooling_params import EMBEDDING_TASKS, PoolingParams
from ....ipc.spec.models.model_config import ModelConfig
from ....ipc.spec.models.pooling.pooling_config import DenseConfig, DenseNormConfig, HeadLayer, TokenRowsConfig
from ...models.load import rooted
from ...weights.checkpoint import Checkpoint, TensorSlice

OpenCheckpoint = Callable[[Path], AbstractContextManager[Checkpoint]]
Layer = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Layer] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class PoolingLayers:
    """Layers of one model. `head_layers` is empty if the model has no classification head."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer] = (),
        head_layers: Sequence[Layer] = (),
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        """`is_batch_invariant`: compute each row by itself, so that its bits do not depend on the others."""
        self.config = config.pooling
        self._layers, self._head_layers = layers, head_layers
        self._is_batch_invariant = is_batch_invariant

    @classmethod
    def load(
        cls, folder: Path, config: ModelConfig, open_checkpoint: OpenCheckpoint, *, is_batch_invariant: bool = False
    ) -> PoolingLayers:
        """Load the layers of the checkpoint in `folder`. `open_checkpoint` opens the weights in a folder. ConfigError
        if a tensor is missing or has another shape."""
        pooling = config.pooling
        head = [] if pooling.head is None else pooling.head.layers
        read = _Reader(folder, config, open_checkpoint)
        return cls(
            config,
            [read.layer(each) for each in pooling.layers],
            [read.layer(each) for each in head],
            is_batch_invariant=is_batch_invariant,
        )

    def results(self, vectors: Tensor, params: PoolingParams) -> Tensor:
        """Return the results [n, outputs] of rows with equal parameters. vectors: [n, inputs] float32, pooled vectors
        or, for a task by tokens, the hidden states of tokens."""
        if self._is_batch_invariant and len(vectors) > 1:
            return torch.cat([self._results(row.unsqueeze(0), params) for row in vectors])
        return self._results(vectors, params)

    def _results(self, rows: Tensor, params: PoolingParams) -> Tensor:
        if params.task is None or params.task in EMBEDDING_TASKS:
            return self._embeddings(rows, params)
        head = self.config.head
        assert head is not None, "the frontend refuses tasks for which there is no head"
        for layer in self._head_layers:
            rows = layer(rows)
        columns = params.returned_token_ids or head.returned_token_ids
        if columns is not None:
            rows = rows[:, columns]
        if params.use_activation is False or head.activation == "none":
            return rows
        return rows.sigmoid() if head.activation == "sigmoid" else rows.softmax(-1)

    def _embeddings(self, rows: Tensor, params: PoolingParams) -> Tensor:
        for layer in self._layers:
            rows = layer(rows)
        rows = rows[:, : params.dimensions]
        is_normalized = self.config.is_normalized if params.use_activation is None else params.use_activation
        return functional.normalize(rows, dim=-1) if is_normalized else rows


class _Reader:
    """Reader of layers from the files of one model."""

    def __init__(self, folder: Path, config: ModelConfig, open_checkpoint: OpenCheckpoint) -> None:
        self._folder, self._config, self._open = folder, config, open_checkpoint

    def layer(self, config: HeadLayer) -> Layer:
        if isinstance(config, TokenRowsConfig):
            return self._token_rows(config)
        with self._open(self._folder / config.folder) as checkpoint:
            return _norm(checkpoint, config) if isinstance(config, DenseNormConfig) else _dense(checkpoint, config)

    def _token_rows(self, config: TokenRowsConfig) -> Layer:
        shape = (self._config.vocab_size, config.num_inputs)
        with self._open(self._folder) as checkpoint:
            names = rooted(self._config.names, checkpoint)
            is_tied = self._config.tie_word_embeddings and f"{names.head}.weight" not in checkpoint
            name = f"{names.embedding if is_tied else names.head}.weight"
            slices = [TensorSlice(name, shape, 0, range(each, each + 1)) for each in config.token_ids]
            weight = checkpoint.load(*slices, dtype=torch.float32)
        if len(weight) == 2:
            weight = weight[1:] - weight[:1]
        return lambda rows: functional.linear(rows, weight)


def _dense(checkpoint: Checkpoint, config: DenseConfig) -> Layer:
    weight = _load(checkpoint, config.weight, (config.num_outputs, config.num_inputs))
    bias = _load(checkpoint, config.bias, (config.num_outputs,)) if config.bias else None
    activation = ACTIVATIONS[config.activation]
    return lambda rows: activation(functional.linear(rows, weight, bias))


def _norm(checkpoint: Checkpoint, config: DenseNormConfig) -> Layer:
    weight = _load(checkpoint, config.weight, (config.size,))
    bias = _load(checkpoint, config.bias, (config.size,)) if config.bias else None
    return lambda rows: functional.layer_norm(rows, (config.size,), weight, bias, config.eps)


def _load(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    return checkpoint.load(TensorSlice(name, shape), dtype=torch.float32)
