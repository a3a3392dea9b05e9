"""frontend → media process and back, a stream socket: images to decode and resize. Bytes stay in the blob store."""

from __future__ import annotations

from typing import TypeAlias

from ..errors import ErrorInfo
from .base import Message


class MediaReady(Message, frozen=True, kw_only=True, tag="media_ready"):
    """First message of a media process: it waits for orders."""


class ReadImage(Message, frozen=True, kw_only=True, tag="read_image"):
    """Order to make a media file of an image; ImageRead or ImageNotRead replies."""

    source: bytes  # SHA-256 of the image as it was sent, in the blob store
    settings: bytes  # JSON of an ImageProcessorConfig
    max_pixels: int


class ImageRead(Message, frozen=True, kw_only=True, tag="image_read"):
    """The media file is in the blob store; the process pins it until it has made another one."""

    digest: bytes
    num_bytes: int
    grid: tuple[int, int, int]


class ImageNotRead(Message, frozen=True, kw_only=True, tag="image_not_read"):
    error: ErrorInfo


MediaAnswer: TypeAlias = MediaReady | ImageRead | ImageNotRead
