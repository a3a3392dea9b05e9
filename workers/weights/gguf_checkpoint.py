"""GgufCheckpoint: reads slices of the tensors of GGUF files, by an index with the names of a safetensors checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.config.gguf_index import BLOCKS, CODE_BITS, GgufTensor, check_unchanged, read_gguf_index
from ...ipc.spec.models.quantization_config import QuantizationConfig
from ...kernels.four_bits import ZERO_STEPS
from ...kernels.quantized import QuantizedWeight, concatenate, pack_halves, quantize
from .checkpoint import Checkpoint, TensorSlice
from .gguf_blocks import FLOATS, dequantize, read_groups

GROUP = 32  # number of inputs that share a scale, in weights that are kept as codes
ZERO = 8  # the 4-bit code of 0 in formats without mins
CHUNK_ELEMENTS = 1 << 21  # number of elements that are converted to floats at a time
FORMS = {  # by format, the form in which codes are kept; int8 for all other formats
    "Q4_0": "int4",
    **dict.fromkeys(("Q4_1", "Q4_K"), "int4 with mins"),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), "levels of IQ4"),
    "MXFP4": "levels of FP4",
}


class GgufCheckpoint(Checkpoint):
    """Checkpoint of GGUF files. `load` converts matrices to floats, exactly; `load_codes` keeps them as codes."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationConfig | None = None,
    ) -> None:
        self._index = read_gguf_index(folder) or {}
        files = {name: folder / tensor.file for name, tensor in self._index.items()}
        super().__init__(folder, dtype, device, quantization, files)
        self.source = min(files.values(), default=folder).resolve()

    def load_codes(self, *slices: TensorSlice) -> QuantizedWeight | None:
        """Read slices and concatenate them along axis 0, as codes of 8 or 4 bits; None if one is stored as floats.

        Slices that cannot be kept as they are become int8, with a scale for each GROUP inputs: those in a format that
        is not in CODE_BITS, those that cut a group, and, if the slices' forms differ, those in other forms than
        int8."""
        tensors = [self._checked(wanted) for wanted in slices]
        if any(tensor.kind in FLOATS for tensor in tensors):
            return None
        forms = {FORMS.get(tensor.kind, "int8") for tensor in tensors}
        form = forms.pop() if len(forms) == 1 else "int8"
        return concatenate([self._codes(wanted, form) for wanted in slices])

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def load_stored(self, wanted: TensorSlice, dtypes: object, device: torch.device | None = None) -> Tensor:
        raise ConfigError(f"{self.folder}: {wanted.name} cannot be read as it is stored in a GGUF file")

    def _read(self, wanted: TensorSlice, target: Tensor) -> None:
        tensor = self._checked(wanted)
        size = wanted.shape[wanted.axis]
        real = range(min(wanted.range.start, size), min(wanted.range.stop, size))
        if target.device.type != "meta":
            rows, columns = (real, slice(None)) if wanted.axis == 0 else (range(wanted.shape[0]), _span(real))
            for at, values in self._floats(tensor, rows):
                chosen = values if len(wanted.shape) == 1 else values[:, columns]
                target[at : at + len(values)].narrow(wanted.axis, 0, chosen.shape[wanted.axis]).copy_(chosen)
        target.narrow(wanted.axis, len(real), len(wanted.range) - len(real)).zero_()

    def _floats(self, tensor: GgufTensor, rows: range) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements of some rows piece by piece, each piece with the index of its first row in `rows`."""
        step = max(CHUNK_ELEMENTS * tensor.shape[0] // tensor.num_elements, 1)
        if tensor.rotated:
            step = -(-step // tensor.rotated) * tensor.rotated
        for first in range(rows.start, rows.stop, step):
            data = self._rows(tensor, range(first, min(first + step, rows.stop)))
            values = dequantize(tensor.kind, data)
            if len(tensor.shape) == 1:
                values = values.flatten()
            yield first - rows.start, values.float() + tensor.added if tensor.added else values

    def _rows(self, tensor: GgufTensor, rows: range) -> Tensor:
        """Return the bytes of rows, in the model's order of rows: [rows, bytes] uint8."""
        row_bytes = tensor.num_bytes // tensor.shape[0]
        if any(tensor.grouped):
            order = _rows_by_kv_head(tensor.shape[0], *tensor.grouped)
            whole = self._open(self.folder / tensor.file)[tensor.offset : tensor.offset + tensor.num_bytes]
            return whole.view(-1, row_bytes)[order[rows.start : rows.stop]]
        begin = tensor.offset + rows.start * row_bytes
        data = self._open(self.folder / tensor.file)[begin : begin + len(rows) * row_bytes].view(len(rows), row_bytes)
        if not tensor.rotated:
            return data
        return data.view(-1, tensor.rotated // 2, 2, row_bytes).transpose(1, 2).reshape(len(rows), row_bytes)

    def _codes(self, wanted: TensorSlice, form: str) -> QuantizedWeight:
        tensor = self._tensor(wanted.name)
        rows, columns = (wanted.range, range(wanted.shape[1])) if wanted.axis == 0 else (None, wanted.range)
        is_cut = columns.start % GROUP or columns.stop % GROUP
        if is_cut or tensor.kind not in CODE_BITS or FORMS.get(tensor.kind, "int8") != form:
            floats = self.load(wanted, dtype=torch.float32)
            size = GROUP if floats.shape[1] % GROUP == 0 else None
            return quantize(floats, "int8", self.dtype, size)
        count = wanted.shape[0] if rows is None else len(rows)
        data = self._rows(tensor, range(count) if rows is None else rows)
        found = read_groups(tensor.kind, data.reshape(-1, BLOCKS[tensor.kind][1]))
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        parts = (None if each is None else each.reshape(count, -1, *each.shape[2:])[:, groups] for each in found[:3])
        codes, scales, mins = (None if each is None else each.contiguous() for each in parts)
        assert codes is not None and scales is not None
        if form == "int8":
            return QuantizedWeight(codes.flatten(1), scales, None, GROUP, None, self.dtype)
        has_zeros = form == "int4"
        zeros = torch.full_like(scales, ZERO * ZERO_STEPS, dtype=torch.uint8) if has_zeros else None
        packed = pack_halves(codes.flatten(1) + (ZERO if has_zeros else 0))
        return QuantizedWeight(packed, scales, zeros, GROUP, None, self.dtype, mins, found.levels)

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self._index.get(name)
        if tensor is None:
            raise ConfigError(
                f"{self.source}: tensor {name} is missing, among {len(self._index)}: the file does not fit its "
                "metadata or is incomplete"
            )
        return tensor

    def _checked(self, wanted: TensorSlice) -> GgufTensor:
        """Check the shape of a tensor, report progress, and return its entry in the index. ConfigError if it is missing
        or has another shape."""
        tensor = self._tensor(wanted.name)
        self._note_read(wanted.name)
        if tensor.shape != wanted.shape:  # is_transposed does not matter: all matrices are [out, in] in GGUF
            raise ConfigError(
                f"{self.source}: tensor {wanted.name} has shape {list(tensor.shape)}, the metadata ask "
                f"for {list(wanted.shape)}: fetch the file again"
            )
        return tensor

    def _open(self, path: Path) -> Tensor:
        data = self._open_files.get(path)
        if data is None:
            check_unchanged(path)
            data = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))  # "c": torch warns of read-only arrays
            self._open_files[path] = data
        return data


def _rows_by_kv_head(num_rows: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return, for queries, keys and values in the order of KV heads, the row of each in an order of kinds: [num_rows]
    int64."""
    heads = torch.arange(num_heads + 2 * num_kv_heads)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads])
    order = torch.cat([queries.view(num_kv_heads, -1), keys[:, None], values[:, None]], dim=1).flatten()
    size = num_rows // len(heads)
    return (order[:, None] * size + torch.arange(size)).flatten()


def _span(elements: range) -> slice:
    return slice(elements.start, elements.stop)
