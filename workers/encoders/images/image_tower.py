"""ImageTower: an encoder of images. Units of pixels are embedded as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....ipc.blobs.media_file import MediaFile
from ....ipc.spec.models.vision_config import Grid
from ..blocks import Block, EncoderState, Tower
from .image_files import ImageFiles


@dataclass(eq=False)
class ImageState(EncoderState):
    """Encoder state of an image. Its pixels are cut into units that are embedded one by one: tiles, bands (rows of
    patches) or single patches."""

    units: Tensor  # uint8 [units, height, width, 3]
    rows_per_unit: int
    grid: Grid
    places: Tensor | None = None  # learned positions of patches [rows, hidden]
    order: Tensor | None = None  # indices that put the embeddings into the order of the prompt
    embedded: Tensor | None = None  # embedded rows that are left for the next piece
    num_embedded: int = 0  # units that are embedded


class ImageTower(Tower[ImageState]):
    """An encoder of images. Parameters are those of Tower."""

    def __init__(
        self,
        files: ImageFiles,
        blocks: list[Block],
        kept_layers: Sequence[int] = (),
        windowed: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(blocks, kept_layers, windowed)
        self._files = files

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        """Return the initial state of an image, uint8 [tiles, height, width, 3], cut into units; nothing is computed
        from its pixels yet."""
        raise NotImplementedError

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        """Return the rows [n × rows_per_unit, hidden] of the n units from `first` on. pixels: [n, 3, height, width]."""
        raise NotImplementedError

    def open(self, media: MediaFile, grid: Grid) -> ImageState:
        return self.begin(self._files.read(media, grid), grid)

    def rows(self, state: ImageState, start: int, stop: int) -> Tensor:
        rows, first, count = state.embedded, state.num_embedded, stop - start
        num_missing = count - (0 if rows is None else len(rows))
        if num_missing > 0:
            state.num_embedded = first + -(-num_missing // state.rows_per_unit)
            more = self.embed(state, self._files.numbers(state.units[first : state.num_embedded]), first)
            rows = more if rows is None else torch.cat((rows, more))
        assert rows is not None
        state.embedded = rows[count:]
        return rows[:count]

    def finish(self, state: ImageState) -> Tensor:
        embeds = super().finish(state)
        return embeds if state.order is None else embeds[state.order]
