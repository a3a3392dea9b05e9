"""Types of numpy arrays, and the decoding of ids in a message."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...ipc.errors import ProtocolError

I32: TypeAlias = npt.NDArray[np.int32]
I64: TypeAlias = npt.NDArray[np.int64]
U32: TypeAlias = npt.NDArray[np.uint32]
F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def ids_of(frame: bytes) -> I32:
    """Decode a frame of int32 ids as a read-only array. ProtocolError if its length is not a multiple of 4 bytes."""
    if len(frame) % 4:
        raise ProtocolError(f"an id frame has {len(frame)} bytes, which is not a multiple of 4")
    return np.frombuffer(frame, np.int32)


def tuples_of(name: str, frame: bytes, width: int = 3) -> I32:
    """Decode tuples of `width` numbers [m, width]; ProtocolError if they make none."""
    numbers = ids_of(frame)
    if len(numbers) % width:
        raise ProtocolError(f"{name} holds {len(numbers)} numbers, which make no tuples of {width}")
    return numbers.reshape(-1, width)
