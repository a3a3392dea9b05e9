"""The media process: python -m tokenloom.frontend.server.media.process --fd N

Decodes media, one at a time: it takes an image or an audio clip from the engine's blob store and puts media files
there. The frontend starts it (`decoder.py`) and may kill it at any moment. A medium costs the memory and time of this
process alone, which has a limited address space.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ....ipc.blobs.media_file import media_header
from ....ipc.blobs.store import BlobStore
from ....ipc.blobs.writer import BlobWriter
from ....ipc.errors import Overloaded, RequestError, TokenloomError, error_info
from ....ipc.helper_work import run_helper
from ....ipc.messages.media import MEDIUM, MediaKind
from ....ipc.messages.media_process import MediaAnswer, MediaNotRead, MediaOrder, MediaPart, MediaRead, ReadImage
from ....ipc.process.faults import maybe_fail
from ....ipc.spec.config.engine_spec import EngineSpec
from .media_content import MediaContent

ADDRESS_SPACE_BYTES = 2 << 30
USER = "media process"  # of its pins


class MediaProcess:
    """Process that carries out the frontend's orders, one at a time, until the socket closes. It pins its last media
    files until the next ones are written, so that the frontend has time to pin them."""

    def __init__(self, spec: EngineSpec) -> None:
        self._store = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes)
        self._pinned: set[bytes] = set()  # the last media files

    def answer(self, order: MediaOrder, _: bytearray) -> MediaAnswer:
        maybe_fail("media.read")
        kind: MediaKind = "image" if isinstance(order, ReadImage) else "audio"
        try:
            return self._read(order, MEDIUM[kind])
        except TokenloomError as error:
            return MediaNotRead(error=error_info(error))
        except MemoryError:
            limit = ADDRESS_SPACE_BYTES >> 30
            text = f"the {MEDIUM[kind]} needs more than {limit} GiB to be decoded: send a smaller one"
            return MediaNotRead(error=error_info(RequestError(text)))

    def _read(self, order: MediaOrder, name: str) -> MediaRead:
        data = self._store.open(order.source)
        if data is None:
            raise Overloaded(f"the {name} has left the store before it was read: send it again")
        parts: list[MediaPart] = []
        try:
            parts.extend(map(self._write, _contents(data, order)))
        except BaseException:
            self._unpin({part.digest for part in parts} - self._pinned)
            raise
        before, self._pinned = self._pinned, {part.digest for part in parts}
        self._unpin(before - self._pinned)
        return MediaRead(parts=parts)

    def _unpin(self, digests: set[bytes]) -> None:
        for digest in digests:
            self._store.unpin(digest, USER)

    def _write(self, content: MediaContent) -> MediaPart:
        """Put a media file into the store, pinned."""
        header = media_header(content.grid, content.shape)
        with contextlib.closing(BlobWriter(self._store.folder, len(header) + math.prod(content.shape))) as writer:
            writer.write(header)
            for chunk in content.chunks:
                writer.write(chunk)
            self._store.add(writer, USER)
            return MediaPart(
                digest=writer.digest(),
                num_bytes=writer.num_bytes,
                grid=content.grid,
                start_s=content.start_s,
                end_s=content.end_s,
            )


def _contents(data: memoryview, order: MediaOrder) -> Iterator[MediaContent]:
    """Decode a medium. Pillow is imported with the first image, numpy with the first clip."""
    if isinstance(order, ReadImage):
        from .images.read_image import read_image

        return read_image(data, order)
    from .read_audio import read_audio

    return read_audio(data, order)


def main() -> int:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's; the buffers of many would not fit the address space
    return run_helper(
        "media",
        "Decodes images and audio.",
        MediaOrder,
        lambda spec: MediaProcess(spec).answer,
        ADDRESS_SPACE_BYTES,
    )


if __name__ == "__main__":
    sys.exit(main())
