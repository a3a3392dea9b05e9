"""Messages between a frontend and a media process, over a stream socket: orders to decode media, and replies. The bytes
of media stay in the blob store."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ErrorInfo
from .base import Message


class ReadImage(Message, frozen=True, kw_only=True, tag="read_image"):
    """Order to make a media file of an image. The reply is MediaRead or MediaNotRead."""

    source: bytes  # SHA-256 of the image as it was sent, in the blob store
    settings: bytes  # JSON of an ImageProcessorConfig
    max_pixels: int


class ReadAudio(Message, frozen=True, kw_only=True, tag="read_audio"):
    """Order to make a media file of an audio clip, or of each of its pieces. The reply is MediaRead or MediaNotRead."""

    source: bytes  # SHA-256 of the clip as it was sent, in the blob store
    settings: bytes  # JSON of an AudioProcessorConfig
    max_seconds: float  # limit of the whole clip
    piece_s: float = 0.0  # limit of a piece: the clip is cut at quiet places; 0: it stays whole


class MediaPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A media file in the blob store: an image, a clip, or a piece of one."""

    digest: bytes
    num_bytes: int
    grid: tuple[int, int, int]
    start_s: float = 0.0  # start of a piece in the clip
    end_s: float = 0.0


class MediaRead(Message, frozen=True, kw_only=True, tag="media_read"):
    """Reply to ReadImage or ReadAudio: the media files are in the blob store; the media process pins them until it has
    made others."""

    parts: list[MediaPart]  # one, unless the order has a piece_s


class MediaNotRead(Message, frozen=True, kw_only=True, tag="media_not_read"):
    error: ErrorInfo


MediaOrder: TypeAlias = ReadImage | ReadAudio
MediaAnswer: TypeAlias = MediaRead | MediaNotRead
