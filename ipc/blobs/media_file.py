"""Media files: decoded media, as the media process puts them into the blob store and workers read them.

    "TLMEDIA1" | 3 × uint32: grid | 4 × uint32: shape | uint8 [shape]      little-endian, C order

An image is resized: uint8 [tiles, height, width, 3]. An audio clip is mono at 16 kHz, not padded: float32 [samples], as
bytes [1, 1, samples, 4]. The model family defines the grid, from which encoder and placeholders are sized: for an image
it counts rows and columns of patches or tiles; for a clip it is (windows, 1, samples). The grid is part of the file, so
that media with equal bytes and different shapes have different digests.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from ..errors import RequestError

_HEADER = struct.Struct("<8s3I4I")
_MAGIC = b"TLMEDIA1"


class MediaFile(NamedTuple):
    """Grid, shape and content of a media file."""

    grid: tuple[int, int, int]
    shape: tuple[int, int, int, int]
    data: memoryview  # uint8


def media_header(grid: tuple[int, int, int], shape: tuple[int, int, int, int]) -> bytes:
    """Return the header of a media file: the bytes before the content."""
    return _HEADER.pack(_MAGIC, *grid, *shape)


def parse_media_file(content: memoryview) -> MediaFile:
    """Return the parts of a media file, without copying its content. RequestError if it is damaged."""
    if len(content) < _HEADER.size:
        raise RequestError(f"a media file has {len(content)} bytes, its header alone {_HEADER.size}: send it again")
    magic, *numbers = _HEADER.unpack_from(content)
    shape = (numbers[3], numbers[4], numbers[5], numbers[6])
    size = _HEADER.size + math.prod(shape)
    if magic != _MAGIC or len(content) != size:
        raise RequestError(f"a media file has {len(content)} bytes and its header says {size}: send it again")
    return MediaFile((numbers[0], numbers[1], numbers[2]), shape, content[_HEADER.size :])
