"""WAV files: PCM of 8, 16, 24 and 32 bits and floats of 32 and 64 bits, also as WAVE_FORMAT_EXTENSIBLE.

A file is a list of chunks: a name of 4 bytes, the size as uint32, and the content, padded to an even size. The chunk
`fmt ` describes the samples, `data` contains them. libsndfile accepts files that were cut off, and frames with more
bytes than their samples need; both are refused here.
"""

from __future__ import annotations

import struct

from ...ipc.errors import RequestError
from .sound import Sound
from .sound_file import open_sound

BYTES_BY_CODING = {"PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8}
STREAMED_BYTES = 0x7FFF_0000  # a chunk of at least this size extends to the file's end: written through a pipe
MAX_CHUNKS = 1000
SERVED = "save it as PCM of 8, 16, 24 or 32 bits, or as floats of 32 or 64"


def open_wav(data: memoryview) -> Sound:
    """Return the Sound of a WAV file, after reading its header. RequestError if it is damaged or cut off, or its codec
    is not served."""
    try:
        frame_bytes = _frame_bytes(data)
    except struct.error:
        raise RequestError(f"the WAV file of {len(data)} bytes breaks off in its header: send all of it") from None
    sound = open_sound(data, "WAV")
    sample_bytes = BYTES_BY_CODING.get(sound.coding)
    if sample_bytes is None:
        raise RequestError(f"the WAV audio is coded as {sound.coding}, which is not served: {SERVED}")
    if sample_bytes * sound.num_channels != frame_bytes:
        raise RequestError(
            f"the WAV audio has {frame_bytes} bytes for {sound.num_channels} samples of {8 * sample_bytes} bits: "
            f"{SERVED}"
        )
    return sound


def _frame_bytes(data: memoryview) -> int:
    """Return the bytes of a frame (one sample of each channel) from the header. struct.error if no samples follow the
    header, RequestError if some are missing."""
    frame_bytes, place = 0, 12
    for _ in range(MAX_CHUNKS):
        name, size = struct.unpack_from("<4sI", data, place)
        if name == b"fmt ":
            (frame_bytes,) = struct.unpack_from("<H", data, place + 20)
        if name == b"data" and frame_bytes:
            num_there = len(data) - place - 8
            if num_there < size < STREAMED_BYTES:
                raise RequestError(
                    f"the WAV file has {num_there} of the {size} bytes of sound that its header says: send all of it"
                )
            return frame_bytes
        place += 8 + size + size % 2
    raise struct.error
