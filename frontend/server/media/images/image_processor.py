"""Resize an RGB image and cut it into tiles as a model's processor in transformers does: equal uint8 pixels.

Runs in the media process, with Pillow alone. Rescaling, normalization and patches are the workers' part.
"""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image

from .....ipc.spec.models.vision_config import Grid
from .....ipc.spec.processors.image_processor_config import QWEN, ImageProcessorConfig
from .....ipc.spec.processors.image_sizes import (
    Size,
    bounded_edges_size,
    bounding_box_size,
    longest_edge_size,
    patched_size,
    shortest_edge_size,
    smart_size,
    tile_grid,
    tiled_size,
)
from .resizing import make_square, resize, resize_and_crop, size_of


class ProcessedImage(NamedTuple):
    """Tiles of equal size, and the grid that they form (see ImageProcessorConfig)."""

    grid: Grid
    tiles: list[Image.Image]


def process_image(image: Image.Image, config: ImageProcessorConfig) -> ProcessedImage:
    """Resize an RGB image, and cut it into tiles if the model takes tiles. RequestError if its shape is too extreme for
    the model."""
    if config.family == "idefics3":
        return _split(image, config)
    if config.family == "internvl":
        return _tiled(image, config)
    image = _whole(image, config)
    return ProcessedImage((1, image.height // config.patch_size, image.width // config.patch_size), [image])


def _whole(image: Image.Image, config: ImageProcessorConfig) -> Image.Image:
    """Resize an image that is not cut into tiles, and crop it to its middle if the model's processor does so."""
    if config.square_color is not None:
        image = make_square(image, config.square_color)
    size = _target(size_of(image), config) if config.do_resize else size_of(image)
    if config.crop is not None:
        return resize_and_crop(image, size, config.resample, Size(*config.crop))
    return resize(image, size, config.resample)


def _target(size: Size, config: ImageProcessorConfig) -> Size:
    """Return the size to which the model's processor resizes an image of this size."""
    wanted = config.size
    if config.family in QWEN:
        return smart_size(size, config.factor, wanted.shortest_edge, wanted.longest_edge)
    if config.family == "pixtral":
        return patched_size(size, config.max_size, config.factor)
    if config.family == "idefics3":
        longest = wanted.longest_edge
        return longest_edge_size(size, longest) if longest else Size(wanted.height, wanted.width)
    if wanted.shortest_edge and wanted.longest_edge:
        return bounded_edges_size(size, wanted.shortest_edge, wanted.longest_edge)
    if wanted.shortest_edge:
        return shortest_edge_size(size, wanted.shortest_edge)
    if wanted.max_height and wanted.max_width:
        return bounding_box_size(size, wanted.max_height, wanted.max_width)
    return Size(wanted.height, wanted.width)


def _split(image: Image.Image, config: ImageProcessorConfig) -> ProcessedImage:
    """Return Idefics3's tiles: row by row, then the whole image in the size of a tile; a small image becomes a single
    tile."""
    tile = Size(config.tile_size, config.tile_size)
    image = resize(image, _target(size_of(image), config), config.resample)
    if not config.is_tiled:
        return ProcessedImage((1, 0, 0), [resize(image, tile, config.resample)])
    image = resize(image, tiled_size(size_of(image), config.tile_size), config.resample)
    if size_of(image) == tile:
        return ProcessedImage((1, 0, 0), [image])
    rows, columns = image.height // tile.height, image.width // tile.width
    tiles = [*_cut(image, rows, columns), resize(image, tile, config.resample)]
    return ProcessedImage((len(tiles), rows, columns), tiles)


def _tiled(image: Image.Image, config: ImageProcessorConfig) -> ProcessedImage:
    """Return InternVL's tiles: the grid that suits the image's shape best, then the whole image if there are several
    tiles."""
    tile = Size(config.size.height, config.size.width)
    rows, columns = 1, 1
    if config.is_tiled and config.max_tiles > 1:
        rows, columns = tile_grid(size_of(image), tile, config.min_tiles, config.max_tiles)
    canvas = resize(image, Size(rows * tile.height, columns * tile.width), config.resample)
    tiles = _cut(canvas, rows, columns)
    if len(tiles) > 1:
        tiles.append(resize(image, tile, config.resample))
    return ProcessedImage((len(tiles), rows, columns), tiles)


def _cut(image: Image.Image, rows: int, columns: int) -> list[Image.Image]:
    height, width = image.height // rows, image.width // columns
    corners = [(left * width, top * height) for top in range(rows) for left in range(columns)]
    return [image.crop((left, top, left + width, top + height)) for left, top in corners]
