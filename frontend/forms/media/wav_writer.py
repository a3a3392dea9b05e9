"""Write samples as a WAV file, from a numpy array, a torch tensor or a list. Imports none of these libraries."""

from __future__ import annotations

import array
import struct
from typing import Any

from ....ipc.errors import RequestError

PCM, FLOAT = 1, 3
CODECS = {  # dtype of the samples, as in numpy's array interface → codec, dtype in the file
    "f2": (FLOAT, "<f4"),
    "f4": (FLOAT, "<f4"),
    "f8": (FLOAT, "<f4"),  # the engine computes in float32
    "i2": (PCM, "<i2"),
    "i4": (PCM, "<i4"),
    "u1": (PCM, "|u1"),
}


def wav_of(samples: Any, rate: object) -> bytes:
    """Return a WAV file of samples [n], [channels, n] or [n, channels]; the smaller size is the number of channels.

    Floats have a full scale of ±1, integers that of their type; a list is [n], and its numbers count as floats. `rate`:
    samples a second. RequestError for other samples, or an invalid rate."""
    if not isinstance(rate, int | float) and hasattr(rate, "item"):
        rate = rate.item()  # a numpy number
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < 1 << 32 or rate % 1:
        raise RequestError(f"the rate of an audio clip is {rate!r:.80}: give whole samples a second, such as 16000")
    codec, width, num_channels, content = _content(samples)
    frame_bytes = width * num_channels
    form = struct.pack(
        "<HHIIHH", codec, num_channels, int(rate), int(rate) * frame_bytes & 0xFFFFFFFF, frame_bytes, 8 * width
    )
    head = struct.pack("<4sI4s4sI", b"RIFF", 36 + len(content) & 0xFFFFFFFF, b"WAVE", b"fmt ", len(form))
    return head + form + struct.pack("<4sI", b"data", len(content) & 0xFFFFFFFF) + content


def _content(samples: Any) -> tuple[int, int, int, bytes]:
    """Return the codec, the bytes per sample, the number of channels, and the samples with channels interleaved.
    RequestError for samples of another type or shape."""
    if isinstance(samples, list):
        try:
            return FLOAT, 4, 1, _filled(array.array("f", samples).tobytes())
        except (TypeError, OverflowError) as error:
            raise RequestError(
                f"the samples of an audio clip are a list that holds no numbers alone: {error}"
            ) from None
    if hasattr(samples, "detach"):
        samples = samples.detach().cpu().numpy()
    kind = getattr(getattr(samples, "dtype", None), "str", "")[1:]
    if kind not in CODECS:
        name = getattr(samples, "dtype", type(samples).__name__)
        raise RequestError(
            f"the samples of an audio clip are {name}: give a numpy array of float32, float64, int16, int32 or uint8"
        )
    shape = samples.shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] == shape[1] != 1):
        raise RequestError(
            f"the samples of an audio clip have the shape {shape}: give [n], [channels, n] or [n, channels]"
        )
    if len(shape) == 2 and shape[0] < shape[1]:
        samples = samples.T
    codec, dtype = CODECS[kind]
    converted = samples.astype(dtype)
    num_channels = 1 if len(shape) == 1 else min(shape)
    return codec, converted.dtype.itemsize, num_channels, _filled(converted.tobytes())


def _filled(content: bytes) -> bytes:
    if not content:
        raise RequestError("an audio clip has no samples: give at least one")
    return content
