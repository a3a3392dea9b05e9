"""Tower: the layers of an encoder, computed in pieces of rows, so that a piece takes less time than a decode step.

    open → rows of the medium: patches, or audio after convolutions → layers → projector → embeddings

Making the rows is a stage, and so is each layer. Piece j of a stage computes the stage for the j-th part of the
medium's rows, and then their q, k and v for the next layer. It attends to the keys and values of all rows, which the
stage before has computed. The modules are those of transformers. In torch the results equal those of transformers bit
for bit if a stage has one piece, else within rounding; they are always the same for the same number of pieces, no
matter when these run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ...ipc.blobs.media_file import MediaFile
from ...ipc.spec.models.vision_config import Grid
from .attention import attend, by_heads, joined, rotated

Parts: TypeAlias = dict[str, Any]  # modules by the prefix of their weights' names


class Block(NamedTuple):
    """A layer: x + out(attention(norm(x))), then x + mlp(mlp_norm(x)). `gains` are factors of the two added terms."""

    module: nn.Module  # the module that contains all these parts
    norm: nn.Module
    projections: Sequence[nn.Module]  # to q, k and v, each [n, hidden] → [n, heads × size]; or one to q | k | v
    num_heads: int
    scale: float
    out: Any
    mlp_norm: nn.Module
    mlp: nn.Module
    head_norms: Sequence[nn.Module] = ()  # norms over all queries of a row and over all its keys
    gains: tuple[Tensor, Tensor] | None = None
    limit: float = 0.0  # the layer's outputs are clamped to ±limit; 0: not clamped

    @property
    def head_dim(self) -> int:
        size: int = self.out.in_features
        return size // self.num_heads

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return q, k and v, each [n, heads × size]."""
        if len(self.projections) == 1:
            together: Tensor = self.projections[0](x)
            return together.chunk(3, dim=-1)
        projected = [each(x) for each in self.projections]
        for i, norm in enumerate(self.head_norms):
            projected[i] = norm(projected[i])
        return projected


@dataclass(eq=False, kw_only=True)
class EncoderState:
    """State of a medium in an encoder. `bounds`: rows between two consecutive bounds attend to each other;
    `window_bounds`: the same for layers with windows."""

    bounds: list[int]
    window_bounds: list[int] = field(default_factory=list)
    num_pieces: int = 1  # pieces per stage
    rotations: tuple[Tensor, Tensor] | None = None  # cosines, sines [rows, head size]; their dtype is used to rotate
    next_piece: int = 0  # index of the next piece, counted over all stages
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))  # [rows, hidden size]
    kept: dict[int, Tensor] = field(default_factory=dict)  # outputs that the projector needs, by the number of layers
    queries: Tensor = field(default_factory=lambda: torch.empty(0))  # each row's queries for its next layer
    gathered: Sequence[Tensor] = ()  # keys and values of all rows for the stage's layer
    projected: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # k, v [n, heads, size] for the next layer
    features: tuple[Tensor, ...] = ()  # inputs of the projector
    embeds: list[Tensor] = field(default_factory=list)  # embeddings by piece

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    def cut(self, count: int, piece: int) -> int:
        """Return the index, among `count` rows, of a piece's first row; `count` for the piece after the last one."""
        return count * piece // self.num_pieces


State = TypeVar("State", bound=EncoderState)


class FusedLayers(Protocol):
    """Kernels that compute an encoder's layers for several pieces at once; used instead of `Tower.blocks`."""

    def run(self, state: EncoderState, layer: int, bounds: list[int], cuts: list[int]) -> None:
        """Compute `layer` (−1: none), from its attention on, for consecutive pieces, and then q, k and v of the next
        layer, if there is one. bounds: rows between two consecutive bounds attend to each other. cuts: the first row of
        each piece, and the row after the last piece."""
        ...


class Tower(Generic[State]):
    """An encoder of one model family, with its projector. `kept_layers`: the numbers of the layers whose outputs the
    projector takes, 0 for the rows before the first layer; empty: the last. `windowed`: indices of layers with windows.
    """

    def __init__(
        self, blocks: list[Block], kept_layers: Sequence[int] = (), windowed: frozenset[int] = frozenset()
    ) -> None:
        self.blocks, self._windowed = blocks, windowed
        self._kept_layers = frozenset(kept_layers) or {len(blocks)}
        self.num_layers = len(blocks)  # the number of layers that the embeddings need
        self.fused: FusedLayers | None = None

    def open(self, media: MediaFile, grid: Grid) -> State:
        """Return the initial state of a medium; nothing is computed yet. RequestError if the model does not accept its
        size, or it does not match `grid`."""
        raise NotImplementedError

    def prepare(self, state: State, first: int, last: int) -> None:
        """Run the pieces [first, last) of the stage before the one that makes the rows, if the family has one."""
        raise NotImplementedError

    def rows(self, state: State, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) before the first layer: [n, hidden]. Must be called in the order of rows."""
        raise NotImplementedError

    def features(self, state: State) -> tuple[Tensor, ...]:
        """Return the inputs of the projector, from the kept outputs: tensors [num_embeds, …]."""
        raise NotImplementedError

    def project(self, *features: Tensor) -> Tensor:
        """Return the embeddings [n, (1 + num_deepstack) × hidden] for n rows of the features."""
        raise NotImplementedError

    def groups(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the pieces [first, last) of a stage as ranges, one per call: a single range if that does not change
        their bits."""
        return [(first, last)] if self.fused is not None else [(piece, piece + 1) for piece in range(first, last)]

    def run_layers(self, state: State, number: int, first: int, last: int) -> None:
        """Run the pieces [first, last) of the stage after which `number` layers, at most `num_layers`, are complete;
        the stage with number 0 makes the rows."""
        cuts = [state.cut(state.num_rows, piece) for piece in range(first, last + 1)]
        start, stop, is_last = cuts[0], cuts[-1], last == state.num_pieces
        if not number:
            for low, high in pairwise(cuts):  # one by one: torch may round a row differently together with other rows
                rows = self.rows(state, low, high)
                if not low:
                    state.hidden = rows.new_empty((state.num_rows, rows.shape[1]))
                state.hidden[low:high] = rows
        if self.fused is not None:
            self.fused.run(state, number - 1, self._bounds(state, number - 1), cuts)
        else:
            self._run_blocks(state, number, start, stop, is_last=is_last)
        if is_last and number in self._kept_layers:
            state.kept[number] = state.hidden.clone()

    def run_projector(self, state: State, first: int, last: int) -> None:
        """Run the pieces [first, last) of the last stage, the projector."""
        if first == 0:
            state.features = self.features(state)
        cuts = [state.cut(len(state.features[0]), piece) for piece in range(first, last + 1)]
        for start, stop in pairwise(cuts):
            if start < stop:
                state.embeds.append(self.project(*(each[start:stop] for each in state.features)))

    def finish(self, state: State) -> Tensor:
        """Return the embeddings. Called after all stages."""
        return joined(state.embeds)

    def _bounds(self, state: EncoderState, layer: int) -> list[int]:
        return state.window_bounds if layer in self._windowed else state.bounds

    def _run_blocks(self, state: EncoderState, number: int, start: int, stop: int, *, is_last: bool) -> None:
        """Compute the last of `number` layers for the rows [start, stop), and then their q, k and v for the next
        one."""
        if number:
            state.hidden[start:stop] = self._through_layer(state, number - 1, start, stop)
        if number == self.num_layers:
            return
        q, k, v = self._projected(state, number, start, stop)
        if not number and not start:
            state.queries = q.new_empty((state.num_rows, *q.shape[1:]))
        state.queries[start:stop] = q
        state.projected.append((k, v))
        if is_last:
            state.gathered = [by_heads(pieces) for pieces in zip(*state.projected, strict=True)]
            state.projected.clear()

    def _projected(self, state: EncoderState, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        block = self.blocks[layer]
        projected = block.project(block.norm(state.hidden[start:stop]))
        q, k, v = (each.view(stop - start, block.num_heads, -1) for each in projected)
        if state.rotations is not None:
            cosines, sines = (each[start:stop, None] for each in state.rotations)
            q, k = (rotated(each, cosines, sines) for each in (q, k))
        return q, k, v

    def _through_layer(self, state: EncoderState, layer: int, start: int, stop: int) -> Tensor:
        block, rows, (keys, values) = self.blocks[layer], state.hidden[start:stop], state.gathered
        bounds = self._bounds(state, layer)
        attended: Tensor = block.out(attend(block.scale, state.queries[start:stop], keys, values, bounds, start))
        rows = rows + (attended if block.gains is None else block.gains[0] * attended)
        more: Tensor = block.mlp(block.mlp_norm(rows))
        rows = rows + (more if block.gains is None else block.gains[1] * more)
        return rows.clamp(-block.limit, block.limit) if block.limit else rows
