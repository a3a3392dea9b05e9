"""NamesOnlyCheckpoint: a checkpoint of names and shapes without bytes, which records each element that is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig
from tokenloom.workers.weights.checkpoint import Checkpoint

Shape = tuple[int, ...]
Box = tuple[range, ...]  # of the elements of a tensor, one range an axis

DTYPES = {"_blocks": "U8", "_scales": "U8"}  # of tensors with these endings; the others are BF16


class NamesOnlyCheckpoint(Checkpoint):
    """Tensors of the given shapes on the meta device. `boxes`: the elements read of each tensor, in reading order."""

    def __init__(self, shapes: Mapping[str, Shape], quantization: QuantizationConfig | None = None) -> None:
        file_by_name = dict.fromkeys(shapes, Path("model.safetensors"))
        super().__init__(Path("published"), torch.bfloat16, torch.device("meta"), quantization, file_by_name)
        self.shapes = shapes
        self.boxes: dict[str, list[Box]] = {}

    def _find(self, name: str) -> tuple[Path, NamesOnlySlice]:
        if name not in self.shapes:
            return super()._find(name)  # refuses it
        return self._file_by_name[name], NamesOnlySlice(name, self.shapes[name], self.boxes.setdefault(name, []))

    def join(self, other: NamesOnlyCheckpoint) -> None:
        """Add the elements that another rank of a group read. Those that both read in one piece count once."""
        for name, boxes in other.boxes.items():
            known = self.boxes.setdefault(name, [])
            known.extend([box for box in boxes if box not in known])

    def faults(self, ignored: frozenset[str]) -> list[str]:
        """Return a line for each tensor that was not read as a load plan must: every element exactly once, and nothing
        of those to be ignored."""
        unread = [f"{name} is not read" for name in self.shapes.keys() - self.boxes.keys() - ignored]
        surplus = [f"{name} is read" for name in ignored & self.boxes.keys()]
        uneven = [
            f"{name}: {fault}" for name, boxes in self.boxes.items() if (fault := _fault(self.shapes[name], boxes))
        ]
        return sorted(unread) + sorted(surplus) + uneven


class NamesOnlySlice:
    """Stands for safetensors' slice of a tensor."""

    def __init__(self, name: str, shape: Shape, boxes: list[Box]) -> None:
        self._name, self._shape, self._boxes = name, shape, boxes

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return next((dtype for ending, dtype in DTYPES.items() if self._name.endswith(ending)), "BF16")

    def __getitem__(self, index: tuple[slice, ...] | slice | EllipsisType) -> Tensor:
        slices = () if index is ... else index if isinstance(index, tuple) else (index,)
        full = (*slices, *[slice(None)] * (len(self._shape) - len(slices)))
        box = tuple(range(*part.indices(size)) for part, size in zip(full, self._shape, strict=True))
        self._boxes.append(box)
        dtype = torch.uint8 if self.get_dtype() == "U8" else torch.bfloat16
        return torch.empty([len(part) for part in box], dtype=dtype, device="meta")


def _fault(shape: Shape, boxes: list[Box]) -> str:
    """Say that the boxes do not cover a tensor once; "" if they do."""
    read, size = sum(math.prod(map(len, box)) for box in boxes), math.prod(shape)
    if any(all(_overlap(a, b) for a, b in zip(one, other, strict=True)) for one, other in combinations(boxes, 2)):
        return f"elements are read twice, in {len(boxes)} reads"
    return f"{read} of {size} elements are read" if read != size else ""


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
