"""Recurrent layers of borrowed models: each row has its own state, and such a layer is run separately for each row.

transformers keeps the state of linear attention, state-space and convolution layers in a cache object that belongs to
one batch of rows of equal length. Here every row of the engine has such an object, and a step calls the layer once for
each row, with that row's tokens; if the self-check asks for it, once for each token that continues a state. A state
belongs to exactly one position: a row starts at position 0 with a new state, and a step that does not continue where
the state ends is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..step.model_step import StepContext
from .attention import Unserved

CACHE_ARGUMENTS = ("cache_params", "past_key_values", "past_key_value", "layer_past", "past_states")


class PassingCache(DynamicCache):
    """Cache for attention layers that require one. It stores nothing and returns the keys and values that it is
    given."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any) -> Any:
        return key_states, value_states


class RowState:
    """The state of one row in all recurrent layers, after `num_tokens` tokens."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.cache = DynamicCache(config=config)
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        layers = [each for each in self.cache.layers if isinstance(each, LinearAttentionCacheLayerMixin)]
        tensors = [found for each in layers for found in (*each.conv_states.values(), *each.recurrent_states.values())]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def has_keys(self) -> bool:
        """Whether a layer has stored keys and values here instead of in our KV cache."""
        return any(getattr(layer, "keys", None) is not None for layer in self.cache.layers)


class CachedLayer:
    """Wrapper of a module whose `forward` takes a cache. It can run the module for one row: with the row's cache, and
    with the other arguments cut to the row's tokens."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.forward: Callable[..., Any] = module.forward
        self._signature = inspect.signature(self.forward)
        parameters = self._signature.parameters
        self._rest = next((each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD), None)
        self._cache_argument = next(each for each in CACHE_ARGUMENTS if each in parameters)
        self._has_mask = "attention_mask" in parameters

    def arguments(self, args: tuple[Any, ...], options: dict[str, Any], state: RowState) -> dict[str, Any]:
        """Return the arguments of a call by name, with the cache of `state`."""
        given = self._signature.bind(*args, **options).arguments
        rest = given.pop(self._rest, {}) if self._rest else {}
        return {**given, **rest, self._cache_argument: state.cache}

    def run_row(self, given: dict[str, Any], start: int, stop: int, state: RowState) -> Any:
        """Run the module on tokens [start, stop) of a packed call, as a batch of one row, and return its output. given:
        the call's arguments by name."""
        count = next(each.shape[1] for each in given.values() if isinstance(each, Tensor))
        own = {name: _cut(value, count, start, stop) for name, value in given.items()}
        own[self._cache_argument] = state.cache
        if self._has_mask:
            own["attention_mask"] = None
        return self.forward(**own)


class RecurrentRows:
    """The recurrent states of all rows; runs recurrent layers row by row. A row's state is kept until a request starts
    in the row."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.layers: list[str] = []  # names of the recurrent modules
        self.state_bytes = 0  # bytes of one row's state
        self.is_stepwise = False  # whether a chunk that continues a state is run token by token
        self._config = config
        self._state_by_row: dict[int, RowState] = {}
        self._spans: list[tuple[int, int, RowState]] = []  # tokens [start, stop) of the step, and their row's state

    def begin(self, context: StepContext) -> None:
        """Look up the rows' states before a step. RuntimeError if a row does not continue where its state ends."""
        if not self.layers:
            return
        starts, lengths = context.metadata.query_starts_host, context.metadata.seq_lens_host
        rows = [-1] * len(lengths) if context.rows is None else context.rows.tolist()
        self._spans = []
        for row, start, stop, length in zip(rows, starts, starts[1:], lengths, strict=False):
            state = self._state_of(row, length - (stop - start))
            state.num_tokens = length
            self._spans.append((start, stop, state))

    def _state_of(self, row: int, position: int) -> RowState:
        """Return the state of a row that continues at `position`. At position 0 it is new. For row −1 it is also new,
        and is not kept. RuntimeError if the row's state does not end at `position`."""
        state = self._state_by_row.get(row)
        if position == 0 or row < 0:
            state = RowState(self._config)
        elif state is None or state.num_tokens != position:
            found = "there is none" if state is None else f"its state is that after {state.num_tokens} tokens"
            raise RuntimeError(f"row {row} continues at position {position}, {found}")
        if row >= 0:
            self._state_by_row[row] = state
        return state

    def wrap(self, model: nn.Module, run: Callable[[], object], attends: Callable[[nn.Module], bool]) -> None:
        """Find the recurrent layers of `model`, and make each run row by row from now on.

        `run` runs one forward pass. A module that takes a cache is recurrent if it stores a state there and contains no
        other module that takes one; `attends` says whether it called our attention function. Raises Unserved if a
        module that did not call it stores keys and values in the cache.
        """
        tried = [(layer, RowState(self._config)) for layer in _cached_layers(model)]
        for layer, state in tried:
            layer.module.forward = _with_state(layer, state)
        run()
        for layer, state in tried:
            layer.module.forward = layer.forward
            if attends(layer.module):
                continue
            if state.has_keys:
                raise Unserved(f"its layer {layer.name} attends without calling an attention function of transformers")
            if state.nbytes:
                self.layers.append(layer.name)
                self.state_bytes += state.nbytes
                layer.module.forward = self._by_row(layer)

    def _by_row(self, layer: CachedLayer) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            given = layer.arguments(args, options, self._spans[0][2])
            outputs = []
            for start, stop, state in self._spans:
                continues = state.num_tokens > stop - start
                size = 1 if self.is_stepwise and continues else stop - start
                outputs += [layer.run_row(given, at, at + size, state) for at in range(start, stop, size)]
            if isinstance(outputs[0], tuple):
                return (torch.cat([each[0] for each in outputs], dim=1), *outputs[0][1:])
            return torch.cat(outputs, dim=1)

        return run


def _cached_layers(model: nn.Module) -> Iterator[CachedLayer]:
    """Yield the innermost modules of decoder layers that take a cache."""
    taking = {
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and not set(CACHE_ARGUMENTS).isdisjoint(inspect.signature(module.forward).parameters)
    }
    for name, module in model.named_modules():
        if module in taking and taking.isdisjoint(list(module.modules())[1:]):
            yield CachedLayer(name, module)


def _with_state(layer: CachedLayer, state: RowState) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        return layer.forward(**layer.arguments(args, options, state))

    return run


def _cut(value: Any, count: int, start: int, stop: int) -> Any:
    """Return tokens [start, stop) of a tensor [1, count, …] or a tuple of such; any other value as it is."""
    if isinstance(value, tuple):
        return tuple(_cut(each, count, start, stop) for each in value)
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == count:
        return value[:, start:stop]
    return value
