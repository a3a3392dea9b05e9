"""Sizes are those of transformers' functions for images of every shape, and their bounds hold."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.image_utils import get_image_size_for_max_height_width
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.processors.image_sizes import (
    Size,
    bounded_edges_size,
    bounding_box_size,
    max_smart_factors,
    smart_size,
    tile_grid,
)

NUM_SIZES = 1000


def random_sizes(seed: int = 5) -> Iterator[Size]:
    """Yield sizes of 1 to 4000 pixels, many of them with simple ratios, whose grids are tied."""
    rng = random.Random(seed)
    for _ in range(NUM_SIZES):
        scale = rng.randint(1, 400)
        yield Size(rng.randint(1, 10) * scale, rng.randint(1, 10) * scale)
        yield Size(rng.randint(1, 4000), rng.randint(1, 4000))
        yield Size(rng.randint(1, 4000), rng.randint(1, 30))


@pytest.mark.parametrize(("fewest", "most", "side"), [(1, 12, 448), (2, 6, 56), (1, 40, 224)])
def test_grids_of_tiles_are_those_of_transformers(fewest: int, most: int, side: int) -> None:
    for size in random_sizes():
        columns, rows = get_optimal_tiled_canvas(tuple(size), (side, side), fewest, most)
        assert tile_grid(size, Size(side, side), fewest, most) == (rows, columns)


@pytest.mark.parametrize(
    ("factor", "lower", "upper"), [(28, 3136, 12845056), (28, 3136, 3136), (32, 65536, 65536), (28, 1, 784)]
)
def test_qwens_sizes_are_those_of_transformers_and_have_a_bound(factor: int, lower: int, upper: int) -> None:
    bound = max_smart_factors(factor, lower, upper)
    for size in random_sizes():
        try:
            expected = smart_resize(*size, factor, lower, upper)
        except ValueError:
            with pytest.raises(RequestError, match="the model takes at most 200: crop or pad it"):
                smart_size(size, factor, lower, upper)
            continue
        found = smart_size(size, factor, lower, upper)
        assert found == expected
        assert (found.height // factor) * (found.width // factor) <= bound


def test_sizes_between_edges_and_in_boxes_are_those_of_transformers() -> None:
    for size in random_sizes():
        assert bounded_edges_size(size, 224, 300) == get_size_with_aspect_ratio(tuple(size), 224, 300)
        assert bounding_box_size(size, 300, 224) == get_image_size_for_max_height_width(tuple(size), 300, 224)
