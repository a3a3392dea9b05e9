"""Sizes to which transformers' image processors resize images, exact to the pixel.

All sizes are (height, width) in pixels. A side of a result may be 0, for an image of extreme shape; the frontend's
resizing refuses such a size. Works on sizes alone, without pixels.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...errors import RequestError

MAX_ASPECT_RATIO = 200  # of Qwen's images
MAX_SPLIT_SIDE = 4096  # of Idefics3's images before they are split


class Size(NamedTuple):
    """Height and width of an image, in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width} × {self.height}"


def shortest_edge_size(size: Size, shortest: int) -> Size:
    """Return the size scaled so that the shorter side has `shortest` pixels."""
    short, long = sorted(size)
    new_long = int(shortest * long / short)
    return Size(new_long, shortest) if size.width <= size.height else Size(shortest, new_long)


def bounded_edges_size(size: Size, shortest: int, longest: int) -> Size:
    """Return the size scaled so that the shorter side has `shortest` pixels, or fewer if the longer side would
    otherwise exceed `longest`."""
    short, long = float(min(size)), float(max(size))
    exact = None
    if long / short * shortest > longest:
        exact = longest * short / long
        shortest = round(exact)
    if min(size) == shortest:
        return size
    scale = shortest if exact is None else exact
    if size.width < size.height:
        return Size(int(scale * size.height / size.width), shortest)
    return Size(shortest, int(scale * size.width / size.height))


def bounding_box_size(size: Size, max_height: int, max_width: int) -> Size:
    """Return the size scaled, up or down, to the largest that fits into both bounds."""
    scale = min(max_height / size.height, max_width / size.width)
    return Size(int(size.height * scale), int(size.width * scale))


def patched_size(size: Size, max_size: Size, patch: int) -> Size:
    """Return Pixtral's size: scaled down to fit into `max_size`, then each side rounded up to whole patches."""
    height, width = size
    ratio = max(height / max_size.height, width / max_size.width)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return Size(((height - 1) // patch + 1) * patch, ((width - 1) // patch + 1) * patch)


def smart_size(size: Size, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Return Qwen's size: multiples of `factor` with a product between the bounds and nearly the same aspect ratio.
    RequestError if that exceeds MAX_ASPECT_RATIO."""
    height, width = size
    ratio = max(size) / min(size)
    if ratio > MAX_ASPECT_RATIO:
        raise RequestError(
            f"the image has {size} pixels, an aspect ratio of {ratio:.4g}; the model takes at most {MAX_ASPECT_RATIO}: "
            "crop or pad it"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return Size(new_height, new_width)


def max_smart_factors(factor: int, min_pixels: int, max_pixels: int) -> int:
    """Return an upper bound of the number of squares with sides of `factor` pixels in an image of `smart_size`.

    A long image that is scaled down keeps one row of squares, however long; one that is scaled up has both sides
    rounded up.
    """
    one_row = math.floor(math.sqrt(MAX_ASPECT_RATIO * max_pixels) / factor)
    side = math.sqrt(min_pixels) / factor
    skew = math.sqrt(MAX_ASPECT_RATIO)
    scaled_up = math.floor(side * side + side * (skew + 1 / skew) + 1)
    return max(1, max_pixels // factor**2, one_row, scaled_up)


def longest_edge_size(size: Size, longest: int) -> Size:
    """Return Idefics3's size: scaled, up or down, so that the longer side has `longest` pixels, at most MAX_SPLIT_SIDE,
    and the other side is even unless that limit applies."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = longest
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest
        width = int(height * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_SPLIT_SIDE:
        width = MAX_SPLIT_SIDE
        height = int(width / ratio)
    elif height > width and height > MAX_SPLIT_SIDE:
        height = MAX_SPLIT_SIDE
        width = int(height * ratio)
    return Size(max(height, 1), max(width, 1))


def tiled_size(size: Size, tile: int) -> Size:
    """Return Idefics3's tiled size: the longer side rounded up to whole tiles, the shorter one scaled by the same
    factor and then rounded up, too."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return Size(height, width)


def tile_grid(size: Size, tile: Size, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return InternVL's rows and columns of tiles: those with the aspect ratio nearest to the image's.

    Of equally near grids, the last one with an area below twice the image's is taken; if there is none, the first.
    """
    ratio = size.width / size.height
    area = size.width * size.height
    best_difference, best = float("inf"), (1, 1)
    for columns, rows in _tile_grids(min_tiles, max_tiles):
        difference = abs(ratio - columns / rows)
        is_equal = difference == best_difference
        if difference < best_difference or (is_equal and area > 0.5 * tile.height * tile.width * columns * rows):
            best_difference, best = difference, (rows, columns)
    return best


@lru_cache(maxsize=10)
def _tile_grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """Return all (columns, rows) with a number of tiles in these bounds, fewest tiles first."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])
