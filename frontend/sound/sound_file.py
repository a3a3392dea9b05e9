"""Decoding of WAV, FLAC, Ogg Vorbis, Ogg Opus and MP3 with libsndfile, from the extra tokenloom[audio]."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from ...ipc.errors import RequestError
from .sound import BLOCK_SAMPLES, NOT_INSTALLED, Samples, Sound

FORMATS = {  # our name of a format → libsndfile's
    "WAV": ("WAV", "WAVEX"),
    "FLAC": ("FLAC",),
    "Ogg Vorbis": ("OGG",),
    "Ogg Opus": ("OGG",),
    "MP3": ("MP3",),
}
UNKNOWN_FRAMES = 1 << 62  # a header with at least this number does not know the true number
MAX_REASON = 80  # longest message of libsndfile that is quoted, in characters


def open_sound(data: memoryview, format: str) -> Sound:
    """Return the Sound of a file of this format, after reading its header. RequestError if the file is damaged,
    contains another format or has no known length, or if libsndfile is not installed."""
    try:
        import soundfile  # costs 15 MB, and is an extra
    except (ImportError, OSError):
        raise RequestError(NOT_INSTALLED) from None
    try:
        with _silent_stderr(format):
            file = soundfile.SoundFile(io.BytesIO(data))
    except (RuntimeError, TypeError, ValueError) as error:
        raise _damaged(format, len(data), error) from None
    if file.format not in FORMATS[format]:
        raise RequestError(f"the {format} audio is {file.format} within: save it again")
    if file.frames >= UNKNOWN_FRAMES:
        raise RequestError(f"the {format} audio does not say how long it is: save it to a file, not through a pipe")
    blocks = _blocks(file, format, len(data))
    return Sound(format, file.subtype, file.samplerate, file.channels, file.frames, blocks)


def _blocks(file: Any, format: str, num_bytes: int) -> Iterator[Samples]:
    step, num_read = max(1, BLOCK_SAMPLES // file.channels), 0
    while True:
        try:
            with _silent_stderr(format):
                block: Samples = file.read(step, dtype="float32", always_2d=True)
        except (RuntimeError, ValueError) as error:
            raise _damaged(format, num_bytes, error) from None
        if not len(block):
            break
        num_read += len(block)
        yield block
    if format == "FLAC" and num_read < file.frames:  # headers of other formats have no exact number
        raise RequestError(f"the FLAC audio has {num_read} of the {file.frames} samples that its header says: send all")


@contextlib.contextmanager
def _silent_stderr(format: str) -> Iterator[None]:
    """Discard stderr while an MP3 is decoded: libmpg123 would write a line to the engine's log for each fault of a
    file."""
    if format != "MP3":
        yield
        return
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _damaged(format: str, num_bytes: int, error: Exception) -> RequestError:
    reason = str(getattr(error, "error_string", error))
    is_plain = reason.isascii() and reason.isprintable() and "<" not in reason and len(reason) <= MAX_REASON
    why = f" ({reason})" if is_plain else ""
    return RequestError(
        f"the {format} audio of {num_bytes} bytes is damaged or cut off{why}: send all of it, or save it again"
    )
