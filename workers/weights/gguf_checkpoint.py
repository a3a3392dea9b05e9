"""GgufCheckpoint: reads slices of the tensors of GGUF files, by an index with the names of a safetensors checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.config.gguf_index import (
    BLOCKS,
    CODE_BITS,
    EXACT_KINDS,
    GgufTensor,
    check_unchanged,
    read_gguf_index,
)
from ...ipc.spec.models.quantization_config import QuantizationConfig
from ...kernels.four_bits import ZERO_STEPS
from ...kernels.quantized import SLICE_ROWS, QuantizedWeight, Weight, concatenate, pack_halves, quantize
from ...kernels.stored_rows import BLOCK_KINDS, GROUP, INT8, INT8_BY_ROW, CodeForm, Multiples, StoredRows
from .checkpoint import Checkpoint, TensorSlice
from .file_pages import FilePages, MemoryPrice
from .gguf_blocks import FLOATS, IQ4, dequantize, read_groups
from .mxfp4 import LEVELS

ZERO = 8  # the 4-bit code of 0 in formats without mins
CHUNK_ELEMENTS = 1 << 21  # number of elements that are converted to floats at a time
FORMS = {  # by format, the form of codes that are read; INT8 for all other formats
    "Q4_0": CodeForm(4, has_zeros=True),
    **dict.fromkeys(("Q4_1", "Q4_K"), CodeForm(4, has_mins=True)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), CodeForm(4, levels=IQ4)),
    "MXFP4": CodeForm(4, levels=LEVELS),
}
BLOCK_FORMS = FORMS | {  # the same of codes that are left in their blocks
    "Q2_K": CodeForm(4, has_mins=True, multiples=Multiples.PAIRS_OF_HALVES),
    "Q3_K": CodeForm(4, multiples=Multiples.OF_HALVES),
    "Q4_K": CodeForm(4, has_mins=True, multiples=Multiples.OF_LINES),
    "Q5_0": CodeForm(5, has_zeros=True),
    "Q5_1": CodeForm(5, has_mins=True),
    "Q5_K": CodeForm(5, has_mins=True, multiples=Multiples.OF_LINES),
    "Q6_K": CodeForm(6, multiples=Multiples.OF_HALVES),
    "Q8_0": INT8,
}
HEAD_FORMS = {kind: BLOCK_FORMS[kind] for kind in EXACT_KINDS}


class GgufCheckpoint(Checkpoint):
    """Checkpoint of GGUF files. `load` converts matrices to floats, exactly; `load_codes` keeps them as codes, and
    `load_blocks` leaves them in the file.

    Pages of rows that were left in the file are given back when the next ones are asked for, see FilePages. They can
    still be read."""

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
        self._pages: dict[Path, FilePages] = {}
        self._price = MemoryPrice()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for pages in self._pages.values():
            pages.close()
        self._pages.clear()

    def load_matrix(self, *slices: TensorSlice) -> Weight:
        """Read slices and concatenate them along axis 0: as they are stored, or as codes, or as floats."""
        rows = self.load_blocks(*slices)
        if rows is not None:
            return rows
        codes = self.load_codes(*slices)
        return self.load(*slices) if codes is None else codes

    def load_blocks(self, *slices: TensorSlice) -> StoredRows | None:
        """Return slices, concatenated along axis 0, as rows that will become codes in the form of each slice's format;
        None if one cuts a block or is in a format that is not packed from blocks, or `keeps_blocks` is False."""
        if not self.keeps_blocks:
            return None
        tensors = [self._checked(wanted) for wanted in slices]
        if not all(_is_packed(t) and not _cuts_block(t, w) for t, w in zip(tensors, slices, strict=True)):
            return None
        return self._stored(slices, [BLOCK_FORMS.get(tensor.kind, INT8) for tensor in tensors])

    def load_rows(self, wanted: TensorSlice) -> StoredRows | None:
        tensor = self._checked(wanted)
        if tensor.added or tensor.kind not in BLOCK_KINDS:
            return None
        return self._stored([wanted], [HEAD_FORMS.get(tensor.kind, INT8_BY_ROW)])

    def load_codes(self, *slices: TensorSlice) -> QuantizedWeight | None:
        """Read slices and concatenate them along axis 0, as codes of 8 or 4 bits; None if one is stored as floats.

        Slices that cannot be kept as they are become int8, with a scale for each GROUP inputs: those in a format that
        is not in CODE_BITS, those that cut a group, and, if the slices' forms differ, those in other forms than
        int8."""
        tensors = [self._checked(wanted) for wanted in slices]
        if any(tensor.kind in FLOATS for tensor in tensors):
            return None
        form = _form_of(tensors)
        return concatenate([self._codes(piece, form) for wanted in slices for piece in _pieces(wanted)])

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def load_stored(self, wanted: TensorSlice, dtypes: object, device: torch.device | None = None) -> Tensor:
        raise ConfigError(f"{self.folder}: {wanted.name} cannot be read as it is stored in a GGUF file")

    def _read(self, wanted: TensorSlice, target: Tensor) -> None:
        tensor = self._checked(wanted)
        if not tensor.parts:
            self._fill(tensor, wanted, target)
            return
        assert wanted.shard is None, "parts are those of encoders, which are read whole"
        sizes = [part.shape[tensor.axis] for part in tensor.parts]
        for part, target_part in zip(tensor.parts, torch.split(target, sizes, tensor.axis), strict=True):
            self._fill(part, TensorSlice(wanted.name, part.shape), target_part)

    def _fill(self, tensor: GgufTensor, wanted: TensorSlice, target: Tensor) -> None:
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
            values = dequantize(tensor.kind, data).view(-1, *tensor.shape[1:])
            if tensor.is_decay:
                values = torch.log(-values.float())
            yield first - rows.start, values.float() + tensor.added if tensor.added else values

    def _rows(self, tensor: GgufTensor, rows: range) -> Tensor:
        """Return the bytes of rows, in the model's order of rows: [rows, bytes] uint8."""
        stored, order = self._bytes(tensor).view(tensor.shape[0], -1), _row_order(tensor)
        return stored[rows.start : rows.stop] if order is None else stored[order[rows.start : rows.stop]]

    def _bytes(self, tensor: GgufTensor) -> Tensor:
        """Return the blocks of a tensor. ConfigError if the file ends before them."""
        path, end = self.folder / tensor.file, tensor.offset + tensor.num_bytes
        data = self._open(path)
        if len(data) < end:
            place = (tensor.file, tensor.offset)
            name = next(name for name, each in self._index.items() if place in _places(each))
            raise ConfigError(
                f"{path.resolve()}: the file has {len(data)} bytes, tensor {name} ends at {end}: fetch the file again"
            )
        self._pages[path].follow(tensor.offset, tensor.num_bytes)
        return data[tensor.offset : end]

    def _stored(self, slices: Sequence[TensorSlice], forms: Sequence[CodeForm]) -> StoredRows:
        for pages in self._pages.values():
            pages.give_back()
        addresses = [self._addresses(wanted) for wanted in slices]
        kinds = [self._tensor(wanted.name).kind for wanted in slices]
        lengths = torch.tensor([len(each) for each in addresses])
        known = tuple(dict.fromkeys(forms))
        places = [known.index(form) for form in forms]
        return StoredRows(
            addresses=torch.cat(addresses),
            kinds=torch.tensor([*map(BLOCK_KINDS.index, kinds)], dtype=torch.uint8).repeat_interleave(lengths),
            forms=torch.tensor(places, dtype=torch.uint8).repeat_interleave(lengths),
            known_forms=known,
            is_exact=set(kinds) <= set(EXACT_KINDS),
            num_inputs=slices[0].part_shape[1],
            owner=tuple(self._open_files.values()),
            read_floats=partial(self.load, *slices),
        )

    def _addresses(self, wanted: TensorSlice) -> Tensor:
        """Return the address of the first block of each row, 0 for rows behind the tensor: [rows] int64."""
        tensor = self._tensor(wanted.name)
        path = self.folder / tensor.file
        check_unchanged(path)
        begin = self._bytes(tensor).data_ptr()
        block_size, block_bytes = BLOCKS[tensor.kind]
        order = _row_order(tensor)
        places = torch.arange(tensor.shape[0]) if order is None else order
        row_bytes = tensor.num_bytes // tensor.shape[0]
        addresses = begin + places * row_bytes
        if wanted.axis == 1:
            self._pages[path].leave(addresses, row_bytes)
            return addresses + wanted.range.start // block_size * block_bytes
        real = addresses[wanted.range.start : wanted.range.stop]
        self._pages[path].leave(real, row_bytes)
        return torch.cat([real, real.new_zeros(len(wanted.range) - len(real))])

    def _codes(self, wanted: TensorSlice, form: CodeForm) -> QuantizedWeight:
        tensor = self._tensor(wanted.name)
        rows, columns = (wanted.range, range(wanted.shape[1])) if wanted.axis == 0 else (None, wanted.range)
        is_cut = columns.start % GROUP or columns.stop % GROUP
        if is_cut or tensor.kind not in CODE_BITS or FORMS.get(tensor.kind, INT8) != form:
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
        if form == INT8:
            return QuantizedWeight(codes.flatten(1), scales, None, GROUP, None, self.dtype)
        zeros = torch.full_like(scales, ZERO * ZERO_STEPS, dtype=torch.uint8) if form.has_zeros else None
        packed = pack_halves(codes.flatten(1) + (ZERO if form.has_zeros else 0))
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
        """Check the shape of a tensor, report progress, and return its entry in the index, with the shape as wanted.
        ConfigError if it is missing or has another shape. Converters have kept or dropped axes of one element."""
        tensor = self._tensor(wanted.name)
        self._note_read(wanted.name)
        if _without_ones(tensor.shape) != _without_ones(wanted.shape):  # is_transposed: matrices are [out, in] in GGUF
            path = (self.folder / tensor.file).resolve()
            raise ConfigError(
                f"{path}: tensor {wanted.name} has shape {list(tensor.shape)}, the metadata ask "
                f"for {list(wanted.shape)}: fetch the file again"
            )
        return tensor.reshaped(wanted.shape)

    def _open(self, path: Path) -> Tensor:
        data = self._open_files.get(path)
        if data is None:
            check_unchanged(path)
            self._pages[path] = FilePages(path, self._price)
            data = self._open_files[path] = self._pages[path].data
        return data


def _form_of(tensors: Iterable[GgufTensor]) -> CodeForm:
    """Return the form that the codes of tensors take together: their own if it is one, else INT8."""
    forms = {FORMS.get(tensor.kind, INT8) for tensor in tensors}
    return forms.pop() if len(forms) == 1 else INT8


def _pieces(wanted: TensorSlice) -> Iterator[TensorSlice]:
    """Cut a slice of rows: temporaries of a whole matrix take longer to be made than to be filled."""
    rows = wanted.range
    if wanted.axis == 1:
        yield wanted
        return
    for first in range(rows.start, rows.stop, SLICE_ROWS):
        yield replace(wanted, shard=range(first, min(first + SLICE_ROWS, rows.stop)))


def _is_packed(tensor: GgufTensor) -> bool:
    return tensor.kind in BLOCK_KINDS and tensor.kind not in FLOATS and not tensor.parts


def _cuts_block(tensor: GgufTensor, wanted: TensorSlice) -> bool:
    """Whether a slice of inputs begins or ends inside a block."""
    size = BLOCKS[tensor.kind][0]
    return wanted.axis == 1 and bool(wanted.range.start % size or wanted.range.stop % size)


def _row_order(tensor: GgufTensor) -> Tensor | None:
    """Return the stored row of each row of the model's tensor, [rows] int64; None if the order is the same."""
    if any(tensor.grouped):
        return _rows_by_kv_head(tensor.shape[0], *tensor.grouped)
    if not tensor.rotated:
        return None
    return torch.arange(tensor.shape[0]).view(-1, tensor.rotated // 2, 2).transpose(1, 2).flatten()


def _rows_by_kv_head(num_rows: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return, for queries, keys and values in the order of KV heads, the row of each in an order of kinds: [num_rows]
    int64."""
    heads = torch.arange(num_heads + 2 * num_kv_heads)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads])
    order = torch.cat([queries.view(num_kv_heads, -1), keys[:, None], values[:, None]], dim=1).flatten()
    size = num_rows // len(heads)
    return (order[:, None] * size + torch.arange(size)).flatten()


def _places(tensor: GgufTensor) -> list[tuple[str, int]]:
    """Return the file and the offset of a tensor, or of each of its parts."""
    return [(each.file, each.offset) for each in tensor.parts or (tensor,)]


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _span(elements: range) -> slice:
    return slice(elements.start, elements.stop)
