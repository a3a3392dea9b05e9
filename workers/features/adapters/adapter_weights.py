"""AdapterWeights: an adapter's updates of a rank's layers, read from its file and sharded and ordered like the layers.

Matrices keep the dtype of the file; the kernels multiply the scale into B when they pack it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from ....ipc.errors import RequestError
from ....ipc.process.page_file import PageFile
from ....ipc.spec.adapters.adapter_file import AdapterFile, AdapterModule
from ....ipc.spec.adapters.tensor_header import TENSORS_NAME, TensorPlace
from ....kernels.contract import LowRankPart, LowRankUpdate
from ...weights.adapted_layers import AdaptedExperts, AdaptedLinear, AdaptedPart
from .base_weights import BaseWeights, rows_of
from .tensor_buffer import TensorBuffer


class AdapterWeights:
    """Open file of an adapter, used as a context manager. A returned update is valid until the next call.
    `num_bytes`: bytes of the tensors read so far."""

    def __init__(self, file: AdapterFile, base: BaseWeights, buffer: TensorBuffer, is_direct: bool) -> None:
        """`is_direct`: bypass the page cache, for a file that will not be read again soon."""
        self.num_bytes = 0
        self._base, self._buffer, self._is_direct = base, buffer, is_direct
        self._path = os.path.join(file.folder, TENSORS_NAME)
        self._modules = {each.target.module: each for each in file.modules}
        self._copies = file.copies
        self._tensors: dict[int, Tensor] = {}  # of the layer that is read, by offset: experts share them

    def __enter__(self) -> AdapterWeights:
        self._file = PageFile(self._path, is_direct=self._is_direct)
        self._buffer.open(self._file, self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def offset_of(self, layer: AdaptedLinear) -> int:
        """Return the offset in the file of a layer's first tensor, 0 if it has none. Layers are read fastest by rising
        offsets."""
        modules = (self._modules[part.module] for part in layer.parts if part.module in self._modules)
        return min((place.offset for module in modules for place in module.places), default=0)

    def update_of(self, layer: AdaptedLinear) -> LowRankUpdate | None:
        """Return the update of a layer or embedding; None if the adapter has none."""
        self._read_modules(layer.parts)
        return self._update(layer.parts, layer.num_outputs)

    def updates_of(self, layer: AdaptedExperts) -> tuple[list[LowRankUpdate | None], list[LowRankUpdate | None]]:
        """Return the updates of the first layers of all experts and of their second layers; two empty lists if the
        adapter has none."""
        self._read_modules(part for parts in (*layer.ups, *layer.downs) for part in parts)
        ups = [self._update(parts, layer.num_up_outputs) for parts in layer.ups]
        downs = [self._update(parts, layer.num_down_outputs) for parts in layer.downs]
        return (ups, downs) if any(ups) or any(downs) else ([], [])

    def check_copies(self, layer: AdaptedLinear) -> None:
        """Check this rank's part of the copies of base weights that are saved with the adapter. RequestError if they
        differ from the base."""
        copies = ((part, copy) for part in layer.parts for copy in self._copies if copy.target.module == part.module)
        for part, copy in copies:
            ids = part.inputs if copy.target.kind == "embedding" else part.outputs
            assert isinstance(ids, range)
            self._read([copy.place])
            if not self._base.holds(part, ids, self._tensors[copy.place.offset]):
                raise RequestError(
                    f"{self._path}: tensor {copy.place.name} differs from the base's: the adapter belongs to another "
                    "base, or changes its vocabulary: merge it into its own base"
                )

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
                magnitudes = rows_of(self._tensors[module.magnitude.offset].float(), part.outputs)
                scale = torch.ones(num_outputs) if scale is None else scale
                norms = self._base.norms(part, a.float(), found[-1].scaled_b)
                scale[part.first_output :][: len(norms)] = magnitudes / norms
        return LowRankUpdate(found, scale) if found else None

    def _matrices(self, module: AdapterModule, expert: int | None) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank], of one expert if the module has all."""
        a, b = self._tensors[module.a.offset], self._tensors[module.b.offset]
        if expert is not None:
            rank, num_experts = module.rank, module.target.num_experts
            a = a[expert * rank : (expert + 1) * rank]
            b = b.view(len(b), rank, num_experts)[:, :, expert]
            if module.are_swapped:
                a, b = b.T, a.T
        return a, b

    def _read_modules(self, parts: Iterable[AdaptedPart]) -> None:
        modules = (self._modules[part.module] for part in parts if part.module in self._modules)
        self._read([place for module in modules for place in module.places])

    def _read(self, places: Sequence[TensorPlace]) -> None:
        """Read tensors; those that were read before are dropped."""
        self._tensors.clear()
        self._tensors = self._buffer.read(places)
        self.num_bytes += sum(tensor.nbytes for tensor in self._tensors.values())


def _columns_of(matrix: Tensor, inputs: range) -> Tensor:
    """Return the columns `inputs` of a matrix, with zeros past its last column."""
    columns = matrix[:, inputs.start : inputs.stop]
    num_missing = len(inputs) - columns.shape[1]
    return torch.nn.functional.pad(columns, (0, num_missing)) if num_missing else columns.contiguous()
