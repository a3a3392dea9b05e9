"""MediaContent: a medium that was decoded, on its way into a media file."""

from __future__ import annotations

from typing import NamedTuple


class MediaContent(NamedTuple):
    """Grid, shape and content of a media file (`ipc/blobs/media_file.py`), and its place in a clip."""

    grid: tuple[int, int, int]
    shape: tuple[int, int, int, int]
    chunks: list[bytes | memoryview]  # the content, in order
    start_s: float = 0.0  # of a piece of a clip
    end_s: float = 0.0
