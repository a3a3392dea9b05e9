"""AdapterWeights: an adapter's updates of a rank's layers, read from its file as the layers were cut and ordered.

The file is read, not mapped: a damaged or shortened file is an error of one fill, and ends no process. Matrices keep
the file's type: the kernels fold the scale into B while they pack it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from ...ipc.adapters.adapter_file import AdapterFile, AdapterModule
from ...ipc.adapters.tensor_header import TENSORS_NAME, TensorPlace
from ...ipc.errors import RequestError
from ...kernels.contract import LowRankPart, LowRankUpdate
from ..weights.adapted_layers import AdaptedExperts, AdaptedLinear, AdaptedPart
from .base_weights import BaseWeights, rows_of

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class AdapterWeights:
    """An open adapter, used as a context manager. `num_bytes`: of the tensors read so far."""

    def __init__(self, file: AdapterFile, base: BaseWeights) -> None:
        self.num_bytes = 0
        self._base = base
        self._path = os.path.join(file.folder, TENSORS_NAME)
        self._modules = {each.target.module: each for each in file.modules}
        self._copies = file.copies
        self._recent: dict[int, Tensor] = {}  # tensors of the layer that is read, by offset: experts share them

    def __enter__(self) -> AdapterWeights:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def update_of(self, layer: AdaptedLinear) -> LowRankUpdate | None:
        """Return the update of a layer or embedding; None if the adapter has none."""
        self._recent.clear()
        return self._update(layer.parts, layer.num_outputs)

    def updates_of(self, layer: AdaptedExperts) -> tuple[list[LowRankUpdate | None], list[LowRankUpdate | None]]:
        """Return the updates of each expert's two layers, or two empty lists."""
        self._recent.clear()
        ups = [self._update(parts, layer.num_up_outputs) for parts in layer.ups]
        downs = [self._update(parts, layer.num_down_outputs) for parts in layer.downs]
        return (ups, downs) if any(ups) or any(downs) else ([], [])

    def check_copies(self, layer: AdaptedLinear) -> None:
        """Check this rank's part of the base's weights that are saved with the adapter. RequestError if they are
        others."""
        copies = ((part, copy) for part in layer.parts for copy in self._copies if copy.target.module == part.module)
        for part, copy in copies:
            ids = part.inputs if copy.target.kind == "embedding" else part.outputs
            assert isinstance(ids, range)
            if not self._base.holds(part, ids, self._read(copy.place)):
                raise RequestError(
                    f"{self._path}: tensor {copy.place.name} differs from the base's: the adapter belongs to another "
                    "base, or changes its vocabulary: merge it into its own base"
                )
        self._recent.clear()

    def _update(self, parts: Sequence[AdaptedPart], num_outputs: int) -> LowRankUpdate | None:
        found, scale = [], None
        for part in parts:
            module = self._modules.get(part.module)
            if module is None:
                continue
            a, b = self._matrices(module, part.expert)
            found.append(
                LowRankPart(part.first_output, _columns_of(a, part.inputs), rows_of(b, part.outputs), module.scale)
            )
            if module.magnitude is not None:
                magnitudes = rows_of(self._read(module.magnitude).float(), part.outputs)
                scale = torch.ones(num_outputs) if scale is None else scale
                norms = self._base.norms(part, a.float(), found[-1].scaled_b)
                scale[part.first_output :][: len(norms)] = magnitudes / norms
        return LowRankUpdate(found, scale) if found else None

    def _matrices(self, module: AdapterModule, expert: int | None) -> tuple[Tensor, Tensor]:
        """Read A [rank, in] and B [out, rank], of one expert if the module has all."""
        a, b = self._read(module.a), self._read(module.b)
        if expert is not None:
            rank, num_experts = module.rank, module.target.num_experts
            a = a[expert * rank : (expert + 1) * rank]
            b = b.view(len(b), rank, num_experts)[:, :, expert]
            if module.are_swapped:
                a, b = b.T, a.T
        return a, b

    def _read(self, place: TensorPlace) -> Tensor:
        tensor = self._recent.get(place.offset)
        if tensor is None:
            tensor = self._bytes(place).view(DTYPES[place.dtype]).view(place.shape)
            self._recent[place.offset] = tensor
            self.num_bytes += place.num_bytes
        return tensor

    def _bytes(self, place: TensorPlace) -> Tensor:
        tensor = torch.empty(place.num_bytes, dtype=torch.uint8)
        words, start = tensor.numpy().data, 0
        while start < len(words):
            count = os.preadv(self._fd, [words[start:]], place.offset + start)
            if count == 0:
                raise RequestError(f"{self._path}: the file ends within tensor {place.name}: load the adapter again")
            start += count
        return tensor


def _columns_of(matrix: Tensor, inputs: range) -> Tensor:
    """Return these columns, zeros past the end."""
    columns = matrix[:, inputs.start : inputs.stop]
    num_missing = len(inputs) - columns.shape[1]
    return torch.nn.functional.pad(columns, (0, num_missing)) if num_missing else columns.contiguous()
