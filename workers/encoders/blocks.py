"""Blocks: the layers of a vision encoder, run in pieces of rows, so that a piece takes less time than a decode step.

    begin → stage 0: embedding of patches → stages 1 … L: the layers → stage L + 1: projector → embeddings

Piece j of a stage takes the j-th part of the medium's rows through a layer and through the projections to q, k and v of
the next one. It attends to the keys and values of all rows, which the stage before has left. The modules are those of
transformers, and so are the results: by torch bit for bit in one piece, to rounding in several, and always the same for
the same number of pieces, whenever they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .attention import attend, by_heads, joined, rotated

Parts: TypeAlias = dict[str, Any]  # modules by their root in the names of weights
RowMap: TypeAlias = Callable[[Tensor], Tensor]  # maps each row by itself


class Block(NamedTuple):
    """A layer: x + out(attention(norm(x))), then x + mlp(mlp_norm(x)); `gains` scale both sums."""

    module: nn.Module  # that has all these parts
    norm: nn.Module
    projections: Sequence[nn.Module]  # to q, k and v, each [n, hidden] → [n, heads × size]; or one to all side by side
    num_heads: int
    scale: float
    out: Any
    mlp_norm: nn.Module
    mlp: nn.Module
    head_norms: Sequence[nn.Module] = ()  # of all queries of a row, and of all keys
    gains: tuple[Tensor, Tensor] | None = None

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


@dataclass(eq=False)
class EncoderState:
    """A medium on its way through an encoder. Its units, which are embedded one by one, are tiles, bands or patches.
    `bounds`: rows between two neighbours attend to each other; `window_bounds`: the same in layers with windows."""

    units: Tensor  # uint8 [units, height, width, 3]
    rows_per_unit: int
    grid: tuple[int, int, int]
    bounds: list[int]
    window_bounds: list[int] = field(default_factory=list)
    num_pieces: int = 1  # of a stage
    rotations: tuple[Tensor, Tensor] | None = None  # cosines and sines [rows, size of a head]; their dtype computes
    places: Tensor | None = None  # learned positions of patches [rows, hidden]
    order: Tensor | None = None  # that sorts the rows of the embeddings
    next_piece: int = 0  # of all stages
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))  # [rows, hidden size]
    embedded: Tensor | None = None  # rows for the next piece
    num_embedded: int = 0  # units
    kept: dict[int, Tensor] = field(default_factory=dict)  # rows, by the number of layers before them
    queries: Tensor = field(default_factory=lambda: torch.empty(0))  # of each row, for its next layer
    gathered: Sequence[Tensor] = ()  # keys and values of all rows, for the stage's layer
    projected: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # k, v [n, heads, size] of the next layer
    features: tuple[Tensor, ...] = ()  # of the projector
    embeds: list[Tensor] = field(default_factory=list)  # by piece

    @property
    def num_rows(self) -> int:
        return len(self.units) * self.rows_per_unit

    def cut(self, num_rows: int, piece: int) -> int:
        """Return the first row of a piece, or the one behind the last piece's last."""
        return num_rows * piece // self.num_pieces


class FusedLayers(Protocol):
    """All layers, in the place of blocks."""

    def run(self, state: EncoderState, layer: int, bounds: list[int], cuts: list[int]) -> None:
        """Complete `layer` (−1: none) for consecutive pieces, and begin the next one, if there is one. cuts: the first
        row of each piece, and the row behind the last one."""
        ...


class Tower:
    """An encoder of one family, with its projector. `kept_layers`: numbers of layers whose outputs the projector
    takes, 0 for the embedded patches; `windowed`: indices of layers with windows."""

    def __init__(
        self, blocks: list[Block], kept_layers: Sequence[int] = (), windowed: frozenset[int] = frozenset()
    ) -> None:
        self.blocks, self._windowed = blocks, windowed
        self._kept_layers = frozenset(kept_layers) or {len(blocks)}
        self.num_layers = len(blocks)  # that the embeddings need
        self.fused: FusedLayers | None = None

    def begin(self, image: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        """Cut an image, uint8 [tiles, height, width, 3], into units; nothing is computed from its pixels yet."""
        raise NotImplementedError

    def embed(self, state: EncoderState, pixels: Tensor, first: int) -> Tensor:
        """Return rows [n × rows_per_unit, hidden] of the n units from `first` on, from pixels [n, 3, height, width]."""
        raise NotImplementedError

    def features(self, state: EncoderState) -> tuple[Tensor, ...]:
        """Return the inputs of the projector, from the kept rows: tensors [num_embeds, …]."""
        raise NotImplementedError

    def project(self, *features: Tensor) -> Tensor:
        """Return embeddings [n, (1 + num_deepstack) × hidden] of rows of features."""
        raise NotImplementedError

    def groups(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the pieces [first, last) of a stage by calls: all in one, if that does not change their bits."""
        return [(first, last)] if self.fused is not None else [(piece, piece + 1) for piece in range(first, last)]

    def run_layers(self, state: EncoderState, stage: int, first: int, last: int, scale: RowMap) -> None:
        """Run the pieces [first, last) of a stage up to `num_layers`. `scale` makes numbers of units: → [n, 3, height,
        width]."""
        cuts = [state.cut(state.num_rows, piece) for piece in range(first, last + 1)]
        start, stop, is_last = cuts[0], cuts[-1], last == state.num_pieces
        if not stage:
            rows = self._embedded(state, stop - start, scale)
            if not start:
                state.hidden = rows.new_empty((state.num_rows, rows.shape[1]))
            state.hidden[start:stop] = rows
        if self.fused is not None:
            self.fused.run(state, stage - 1, self._bounds(state, stage - 1), cuts)
        else:
            self._run_blocks(state, stage, start, stop, is_last=is_last)
        if is_last and stage in self._kept_layers:
            state.kept[stage] = state.hidden.clone()

    def run_projector(self, state: EncoderState, first: int, last: int) -> None:
        """Run the pieces [first, last) of the last stage."""
        if first == 0:
            state.features = self.features(state)
        start, stop = (state.cut(len(state.features[0]), piece) for piece in (first, last))
        state.embeds.append(self.project(*(each[start:stop] for each in state.features)))

    def finish(self, state: EncoderState) -> Tensor:
        """Return the embeddings, after all stages."""
        embeds = joined(state.embeds)
        return embeds if state.order is None else embeds[state.order]

    def _bounds(self, state: EncoderState, layer: int) -> list[int]:
        return state.window_bounds if layer in self._windowed else state.bounds

    def _embedded(self, state: EncoderState, count: int, scale: RowMap) -> Tensor:
        rows, first = state.embedded, state.num_embedded
        num_missing = count - (0 if rows is None else len(rows))
        if num_missing > 0:
            state.num_embedded = first + -(-num_missing // state.rows_per_unit)
            more = self.embed(state, scale(state.units[first : state.num_embedded]), first)
            rows = more if rows is None else torch.cat((rows, more))
        assert rows is not None
        state.embedded = rows[count:]
        return rows[:count]

    def _run_blocks(self, state: EncoderState, stage: int, start: int, stop: int, *, is_last: bool) -> None:
        """Take the rows [start, stop) through the layer of a stage, and to q, k and v of the next one."""
        if stage:
            state.hidden[start:stop] = self._through_layer(state, stage - 1, start, stop)
        if stage == self.num_layers:
            return
        q, k, v = self._projected(state, stage, start, stop)
        if not stage and not start:
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
        return rows + (more if block.gains is None else block.gains[1] * more)
