"""Writes adapters byte by byte: well-formed ones of any names and shapes, and damaged ones.

write_adapter_bytes(folder, {"base_model.model.x.lora_A.weight": ("F32", [8, 64])}, r=8)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from tokenloom.ipc.spec.adapters.adapter_config import CONFIG_NAME
from tokenloom.ipc.spec.adapters.tensor_header import TENSORS_NAME

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1}
Shapes = Mapping[str, tuple[str, Sequence[int]]]


def header_of(tensors: Shapes) -> dict[str, object]:
    """Return the header of a file that holds these tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in tensors.items():
        end = place + prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    return header


def tensor_file(header: object, num_bytes: int) -> bytes:
    """Return a safetensors file with this header and zeros behind it."""
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(num_bytes)


def linear_pair(module: str, rank: int, num_inputs: int, num_outputs: int) -> Shapes:
    """Return A and B of a module. module: its path in the file."""
    prefix = f"base_model.model.{module}.lora_"
    return {f"{prefix}A.weight": ("F32", [rank, num_inputs]), f"{prefix}B.weight": ("F32", [num_outputs, rank])}


def write_adapter_bytes(folder: Path, tensors: Shapes, **config: object) -> Path:
    """Write an adapter of zeros and return its folder. config: fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", **config}
    (folder / CONFIG_NAME).write_text(json.dumps(fields), encoding="utf-8")
    num_bytes = sum(prod(shape) * SIZES[dtype] for dtype, shape in tensors.values())
    (folder / TENSORS_NAME).write_bytes(tensor_file(header_of(tensors), num_bytes))
    return folder
