"""The media process: python -m tokenloom.frontend.media.process --fd N

Decodes and resizes images, one at a time: it takes an image from the engine's blob store and puts a media file there.
The frontend starts it (`host.py`) and may kill it at any moment. An image costs the memory and time of this process
alone, whose address space is limited.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import sys
from pathlib import Path

import msgspec

from ...ipc.blobs.media_file import media_header
from ...ipc.blobs.store import BlobStore
from ...ipc.blobs.writer import BlobWriter
from ...ipc.child import limit_address_space, run_child
from ...ipc.codec import Decoder, encode
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import Overloaded, RequestError, TokenloomError, error_info
from ...ipc.messages.media_process import ImageNotRead, ImageRead, MediaReady, ReadImage
from ...ipc.process.faults import maybe_fail
from ...ipc.process.frames import receive_frame, send_frame
from ...ipc.process.malloc import return_large_blocks
from .images.decode import decode_image
from .images.image_processor import ProcessedImage, process_image
from .images.image_processor_config import ImageProcessorConfig

ADDRESS_SPACE_BYTES = 2 << 30
NICENESS = 5  # below the engine's other processes
USER = "media process"  # of its pins


class MediaProcess:
    """Process that obeys the frontend's orders, one at a time, until the socket closes. Pins its last media file until
    the next one is there, so that the frontend has time to pin it."""

    supervisor = None

    def __init__(self, spec: EngineSpec, channel: socket.socket) -> None:
        self._store = BlobStore(Path(spec.run_directory, "media"), spec.config.media_store_bytes)
        self._channel = channel
        self._decoder: Decoder[ReadImage] = Decoder(ReadImage)
        self._pinned = b""

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):
            send_frame(self._channel, [encode(MediaReady())])
            while True:
                order = self._decoder.decode(receive_frame(self._channel))
                maybe_fail("media.read")
                send_frame(self._channel, [encode(self._answer(order))])

    def close(self) -> None:
        self._channel.close()

    def _answer(self, order: ReadImage) -> ImageRead | ImageNotRead:
        try:
            return self._read(order)
        except TokenloomError as error:
            return ImageNotRead(error=error_info(error))
        except MemoryError:
            limit = ADDRESS_SPACE_BYTES >> 30
            text = f"the image needs more than {limit} GiB to be decoded: send a smaller one"
            return ImageNotRead(error=error_info(RequestError(text)))

    def _read(self, order: ReadImage) -> ImageRead:
        config = msgspec.json.decode(order.settings, type=ImageProcessorConfig)
        data = self._store.open(order.source)
        if data is None:
            raise Overloaded("the image has left the store before it was read: send it again")
        image = process_image(decode_image(data, order.max_pixels), config)
        digest, num_bytes = self._write(image)
        if digest != self._pinned:
            self._store.unpin(self._pinned, USER)
            self._pinned = digest
        return ImageRead(digest=digest, num_bytes=num_bytes, grid=image.grid)

    def _write(self, image: ProcessedImage) -> tuple[bytes, int]:
        """Put the media file into the store, pinned; return its digest and size."""
        shape = (len(image.tiles), image.tiles[0].height, image.tiles[0].width, 3)
        header = media_header(image.grid, shape)
        with contextlib.closing(BlobWriter(self._store.folder, len(header) + math.prod(shape))) as writer:
            writer.write(header)
            for tile in image.tiles:
                writer.write(tile.tobytes())
            self._store.add(writer, USER)
            return writer.digest(), writer.num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(prog="tokenloom media", description="Decodes and resizes images.")
    parser.add_argument("--fd", type=int, required=True, help="of the socket to the frontend")
    arguments = parser.parse_args()
    return_large_blocks()
    limit_address_space(ADDRESS_SPACE_BYTES)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # the OOM killer's first choice
    os.nice(NICENESS)
    return run_child("media", lambda spec: MediaProcess(spec, socket.socket(fileno=arguments.fd)))


if __name__ == "__main__":
    sys.exit(main())
