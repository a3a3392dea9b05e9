"""KVGroup: layers of a model that share a block table for each request and a size of block.

Layers are grouped by the tokens that they see and by the shape of their keys and values. So the keys behind a window
can be freed while layers without one keep theirs. All layers with a state are one more group, the last: a block of it
has their state after the last token of the block. The layers of an encoder are one group, without block tables: what
they write is read in the same step alone. Knows sizes alone: where blocks lie is said by PoolShape.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...errors import ConfigError
from ..models.model_config import ModelConfig

MAX_GROUPS = 8


class KVGroup(msgspec.Struct, frozen=True):
    """A group of layers. `layers`: those with keys and values of their own, or with a state, in order; a layer that
    reads the keys of an earlier one is in that one's group."""

    window: int | None  # tokens that a layer sees, its own included; None: all, or the group keeps a state
    layers: tuple[int, ...]
    num_kv_heads: int  # of the model, not of a rank
    head_dim: int
    is_state: bool = False
    is_of_step: bool = False  # requests hold no blocks; each step uses the pool from its start

    @property
    def is_full(self) -> bool:
        """Whether a row needs all its blocks."""
        return self.window is None and not self.is_state

    def most_needed(self, block_size: int) -> int | None:
        """Return the largest number of blocks before a boundary that a row needs to continue there; None: all."""
        if self.is_state:
            return 1
        return None if self.window is None else num_behind(self.window, block_size)

    def num_needed(self, num_blocks: int, block_size: int) -> int:
        """Return how many blocks, the last ones of a row's first `num_blocks`, a row needs to continue after them."""
        most = self.most_needed(block_size)
        return num_blocks if most is None else min(most, num_blocks)

    def num_held(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks that a row of `num_tokens` must hold at a time: of states that which it updates, and
        the one before while it crosses a boundary. step_tokens: its tokens in one step, and those that steps in flight
        sample."""
        num_blocks = -(-num_tokens // block_size)
        if self.is_of_step:
            return 0
        if self.is_state:
            return min(2, num_blocks)
        if self.window is None:
            return num_blocks
        return min(-(-(self.window - 1 + step_tokens) // block_size) + 1, num_blocks)


def is_grouped(model: ModelConfig) -> bool:
    """Return whether the layers of a model are divided into groups. They are not if all layers have to share their
    tables: those of transformers, those with cross attention, and those of encoders."""
    return model.implementation == "native" and model.cross is None and not model.is_encoder


def kv_groups(model: ModelConfig, max_model_len: int, *, is_grouped: bool) -> list[KVGroup]:
    """Return the groups of a model's layers: first the one that sees all tokens, then by falling window, last that of
    layers with a state. A window of max_model_len or more is none. If the model is not grouped, all layers with
    attention are in one group that sees all tokens and has the shape of the layer with the most elements. ConfigError
    if there are more than MAX_GROUPS groups."""
    stateful = tuple(layer for layer in range(model.num_layers) if model.layers[layer].has_state)
    states = [KVGroup(None, stateful, 0, 0, is_state=True)] if stateful else []
    own = [layer for layer in range(model.num_layers) if model.layers[layer].has_own_kv]
    shapes = {layer: model.at_layer(layer) for layer in own}
    if not own and states:
        return states
    if not is_grouped or not own:
        widest = max(shapes.values(), key=lambda each: each.num_kv_heads * each.head_dim, default=model)
        whole = KVGroup(None, tuple(own), widest.num_kv_heads, widest.head_dim, is_of_step=model.is_encoder)
        return [whole, *states]
    layers_by_kind: dict[tuple[int, int, int], list[int]] = {}
    for layer in own:
        window = min(model.layers[layer].window or max_model_len, max_model_len)
        kind = (-window, shapes[layer].num_kv_heads, shapes[layer].head_dim)
        layers_by_kind.setdefault(kind, []).append(layer)
    if len(layers_by_kind) + len(states) > MAX_GROUPS:
        raise ConfigError(
            f"the layers of {model.architecture} have {len(layers_by_kind) + len(states)} kinds of windows and KV "
            f"heads, {MAX_GROUPS} are the most: choose another model"
        )
    kinds = sorted(layers_by_kind, key=lambda kind: (kind[0], layers_by_kind[kind][0]))
    attention = [
        KVGroup(None if -window >= max_model_len else -window, tuple(layers_by_kind[window, heads, dim]), heads, dim)
        for window, heads, dim in kinds
    ]
    return [*attention, *states]


def names_of(groups: Sequence[KVGroup]) -> list[str]:
    """Return a name of each group for users: "attention", "window N" or "states", with the shape if another has the
    same."""
    kinds = ["attention" if group.window is None else f"window {group.window}" for group in groups]
    kinds = ["states" if group.is_state else kind for kind, group in zip(kinds, groups, strict=True)]
    return [
        f"{kind}, {group.num_kv_heads} x {group.head_dim}" if kinds.count(kind) > 1 else kind
        for kind, group in zip(kinds, groups, strict=True)
    ]


def num_behind(window: int, block_size: int) -> int:
    """Return how many blocks before a boundary a token behind it may see through a window."""
    return -(-(window - 1) // block_size)


def num_held(groups: Sequence[KVGroup], num_tokens: int, step_tokens: int, block_size: int) -> list[int]:
    """Return the most blocks of each group that a row of `num_tokens` must hold at a time; see KVGroup.num_held."""
    return [group.num_held(num_tokens, step_tokens, block_size) for group in groups]
