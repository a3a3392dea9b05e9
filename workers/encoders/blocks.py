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
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .attention import Attention, TorchAttention, joined

Parts: TypeAlias = dict[str, Any]  # modules by their root in the names of weights
RowMap: TypeAlias = Callable[[Tensor], Tensor]  # maps each row by itself


class Block(NamedTuple):
    """A layer: x + out(attention(norm(x))), then x + mlp(mlp_norm(x)); `gains` scale both sums."""

    norm: RowMap
    project: Callable[[Tensor], Sequence[Tensor]]  # [n, hidden] → q, k, v, each [n, heads × size]
    num_heads: int
    scale: float
    out: RowMap
    mlp_norm: RowMap
    mlp: RowMap
    gains: tuple[Tensor, Tensor] | None = None


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
    queries: Tensor = field(default_factory=lambda: torch.empty(0))  # [rows, heads, size], for each row's next layer
    gathered: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # keys and values of all rows for the stage's layer
    projected: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # k, v [n, heads, size] of the next layer
    features: tuple[Tensor, ...] = ()  # of the projector
    embeds: list[Tensor] = field(default_factory=list)  # by piece

    @property
    def num_rows(self) -> int:
        return len(self.units) * self.rows_per_unit

    def cut(self, num_rows: int, piece: int) -> int:
        """Return the first row of a piece, or the one behind the last piece's last."""
        return num_rows * piece // self.num_pieces


class Tower:
    """An encoder of one family, with its projector. `kept_layers`: numbers of layers whose outputs the projector
    takes, 0 for the embedded patches; `windowed`: indices of layers with windows."""

    def __init__(
        self, blocks: Sequence[Block], kept_layers: Sequence[int] = (), windowed: frozenset[int] = frozenset()
    ) -> None:
        self._blocks, self._windowed = blocks, windowed
        self._kept_layers = frozenset(kept_layers) or {len(blocks)}
        self.num_layers = len(blocks)  # that the embeddings need
        self.attention: Attention = TorchAttention()

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

    def run_layers(self, state: EncoderState, stage: int, first: int, last: int, scale: RowMap) -> None:
        """Run the pieces [first, last) of a stage up to `num_layers`. `scale` makes numbers of units: → [n, 3, height,
        width]."""
        if stage and self.attention.joins_pieces:
            self._run(state, stage, first, last, scale)
        else:
            for piece in range(first, last):
                self._run(state, stage, piece, piece + 1, scale)

    def run_projector(self, state: EncoderState, piece: int) -> None:
        """Run a piece of the last stage."""
        if piece == 0:
            state.features = self.features(state)
        start, stop = (state.cut(len(state.features[0]), each) for each in (piece, piece + 1))
        state.embeds.append(self.project(*(each[start:stop] for each in state.features)))

    def finish(self, state: EncoderState) -> Tensor:
        """Return the embeddings, after all stages."""
        embeds = joined(state.embeds)
        return embeds if state.order is None else embeds[state.order]

    def _run(self, state: EncoderState, stage: int, first: int, last: int, scale: RowMap) -> None:
        cuts = [state.cut(state.num_rows, piece) for piece in range(first, last + 1)]
        start, stop = cuts[0], cuts[-1]
        rows = self._through_layer(state, stage - 1, cuts) if stage else self._embedded(state, stop - start, scale)
        if not len(state.hidden):
            state.hidden = rows.new_empty((state.num_rows, rows.shape[1]))
        state.hidden[start:stop] = rows
        if stage < self.num_layers:
            q, k, v = self._projected(state, stage, rows, start)
            if not len(state.queries):
                state.queries = q.new_empty((state.num_rows, *q.shape[1:]))
            state.queries[start:stop] = q
            state.projected.append((k, v))
        if last < state.num_pieces:
            return
        if stage in self._kept_layers:
            state.kept[stage] = state.hidden.clone()
        if stage < self.num_layers:
            keys, values = zip(*state.projected, strict=True)
            state.gathered = self.attention.gather(keys, values, self._bounds(state, stage))
            state.projected.clear()

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

    def _projected(self, state: EncoderState, layer: int, rows: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        block = self._blocks[layer]
        q, k, v = (each.view(len(rows), block.num_heads, -1) for each in block.project(block.norm(rows)))
        if state.rotations is not None:
            cosines, sines = (each[start : start + len(rows), None] for each in state.rotations)
            q, k = (rotated(each, cosines, sines) for each in (q, k))
        return q, k, v

    def _through_layer(self, state: EncoderState, layer: int, cuts: list[int]) -> Tensor:
        """cuts: the first rows of consecutive pieces, and the row behind the last one."""
        block, rows, bounds = self._blocks[layer], state.hidden[cuts[0] : cuts[-1]], self._bounds(state, layer)
        queries = state.queries[cuts[0] : cuts[-1]]
        attended = block.out(self.attention.attend(block.scale, queries, state.gathered, bounds, cuts))
        rows = rows + (attended if block.gains is None else block.gains[0] * attended)
        more = block.mlp(block.mlp_norm(rows))
        return rows + (more if block.gains is None else block.gains[1] * more)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the two halves of each head by the angles of its row."""
    wide = x.to(cosines.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


def separate(*projections: RowMap) -> Callable[[Tensor], list[Tensor]]:
    """Return the projections q, k, v of three layers."""
    return lambda x: [project(x) for project in projections]


def in_one(projection: RowMap) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return the projections q, k, v of one layer."""
    return lambda x: projection(x).chunk(3, dim=-1)
