"""Read an image for a media file: decode it, and prepare it as its model's processor does."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .....ipc.messages.media_process import ReadImage
from .....ipc.spec.processors.image_processor_config import ImageProcessorConfig
from ..media_content import MediaContent
from .decode import decode_image
from .image_processor import process_image


def read_image(data: memoryview, order: ReadImage) -> Iterator[MediaContent]:
    """Yield the tiles of an image: uint8 [tiles, height, width, 3]. RequestError if the image cannot be read."""
    config = msgspec.json.decode(order.settings, type=ImageProcessorConfig)
    image = process_image(decode_image(data, order.max_pixels), config)
    first = image.tiles[0]
    chunks: list[bytes | memoryview] = [tile.tobytes() for tile in image.tiles]
    yield MediaContent(image.grid, (len(image.tiles), first.height, first.width, 3), chunks)
