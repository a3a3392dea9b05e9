"""Matrices in blocks of GGUF's formats, and checkpoints of them with an index, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch

from tokenloom.ipc.spec.config.gguf_index import BLOCKS, GGUF_INDEX_NAME, GGUF_STATUS_NAME, GgufTensor, gguf_status
from tokenloom.workers.weights.gguf_blocks import FLOATS

FILE = "00001.gguf"


def random_bytes(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return rows of a format without infinities and NaNs: [rows, bytes] uint8."""
    rng, (elements, _) = np.random.default_rng(seed), BLOCKS[kind]
    if kind in FLOATS:
        values = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(FLOATS[kind])
        return values.view(torch.uint8).numpy().reshape(shape[0], -1)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        floats = rng.standard_normal(shape).astype(np.float32)
        return gguf.quantize(floats, gguf.GGMLQuantizationType[kind])
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, BLOCKS[kind][1]), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    halves |= {"TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": ()}
    for at in halves.get(kind, (0,) if kind.startswith("IQ") else ()):
        numbers = rng.uniform(0.0005, 0.002, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":  # a half in four nibbles
        blocks[:, 49::2] &= 15
        blocks[:, 53] |= 0x40  # the third nibble, 0x0040 << 4
        blocks[:, 55] |= 0x10
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(115, 125, len(blocks))
    return blocks.reshape(shape[0], -1)


def hostile_bytes(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Return rows of random bits, in which scales can be anything: infinite, NaN, negative or below all normal numbers:
    [rows, bytes] uint8."""
    elements, num_bytes = BLOCKS[kind]
    size = (shape[0], shape[1] // elements * num_bytes)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def write_status(folder: Path) -> None:
    status = {FILE: gguf_status(folder / FILE)}
    (folder / GGUF_STATUS_NAME).write_bytes(msgspec.json.encode(status))


def write_matrices(folder: Path, matrices: Mapping[str, tuple[str, tuple[int, int], np.ndarray]]) -> None:
    """Write matrices, by name the kind, the shape and the rows of bytes, as one file with an index."""
    index = {}
    with (folder / FILE).open("wb") as file:
        file.write(b"header".ljust(32))
        for name, (kind, shape, data) in matrices.items():
            index[name] = GgufTensor(file=FILE, kind=kind, shape=shape, offset=file.tell())
            file.write(data.tobytes())
    (folder / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(index))
    write_status(folder)
