"""LinearPacker: packs the weights of linear layers for linear.c, as elements or as codes of 4 to 8 bits."""

from __future__ import annotations

from ctypes import Structure, addressof, byref, c_uint8
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Activation
from ..quantized import QuantizedWeight, Weight, as_floats, fp8_as_int8, unpack_halves
from ..stored_rows import BLOCK, GROUP, INT8, CodeForm, Multiples, StoredRows
from . import library as c
from .arena import PackedMemory

PAIR_OUTPUTS = 32  # outputs of a pair of tiles (see kernels.h)
PAIR_LINE_BYTES = 2048  # bytes of a pair of tiles that holds elements
ZERO_CODE = 128  # the 8-bit code of 0
ALIGNMENT = 64  # bytes of a line, where the codes of a part begin


@dataclass(frozen=True)
class _Layout:
    """The layout of a part of a weight with codes; see Codes in kernels.h."""

    num_bits: int
    num_groups: int
    group_lines: int
    sizes: dict[str, int]  # by name, the bytes of the numbers that each output and group has
    levels: tuple[int, ...] | None
    multiples: Multiples = Multiples.NONE


@dataclass(frozen=True, eq=False)
class CpuLinear:
    """Weight and bias of a linear layer, packed in tiles (see kernels.h)."""

    struct: Structure  # c.Linear
    owner: object  # keeps the memory alive
    in_features: int
    out_features: int
    nbytes: int


class LinearPacker:
    """Packer of linear layers. Owns the memory of the packed weights, which lie in the order of packing."""

    def __init__(self, library: c.KernelLibrary, has_integer_products: bool) -> None:
        """`has_integer_products`: int8 and int4 weights are packed as codes and multiplied as integers if the kernels
        support that, and fp8 weights are rounded to int8; scales of groups are then in half precision. All other
        quantized weights are dequantized, but for stored rows whose codes the kernels can make floats in each product:
        if these are the very floats, the codes are packed."""
        self._library, self._memory = library, PackedMemory()
        self._line = int(library.op_line())
        self.takes_codes = has_integer_products and bool(library.op_has_codes())
        self.unpacks_codes = not has_integer_products and bool(library.op_unpacks_codes())

    def pack(self, weight: Weight, bias: Tensor | None, activation: Activation) -> CpuLinear:
        """Pack a weight [out, in] and a bias [out]. A gated weight has all gates, then all ups."""
        if isinstance(weight, QuantizedWeight) and self._is_rounded(weight):
            weight = fp8_as_int8(weight, GROUP)
        num_rows, num_inputs = weight.shape
        num_outputs = num_rows // 2 if activation.is_gated else num_rows
        struct = c.Linear(
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            num_lines=-(-num_inputs // self._line),
            num_pairs=int(self._library.linear_num_pairs(num_outputs, activation.is_gated)),
            is_gated=activation.is_gated,
            activation=c.ACTIVATIONS[activation.kind],
            limit=activation.limit,
        )
        if isinstance(weight, Tensor) or not self._has_products(weight, struct):
            weight = as_floats(weight).contiguous()
        bias = None if bias is None else bias.contiguous()
        if isinstance(weight, StoredRows):
            struct.has_float_products = self.unpacks_codes
            owner, num_bytes = self._pack_rows(struct, weight, bias)
        elif isinstance(weight, QuantizedWeight):
            owner, num_bytes = self._pack_codes(struct, weight, bias)
        else:
            owner, num_bytes = self._pack_elements(struct, weight, bias)
        return CpuLinear(struct, owner, num_inputs, num_outputs, num_bytes)

    def _is_rounded(self, weight: QuantizedWeight) -> bool:
        """Whether a weight is fp8 that becomes codes, which the kernels can multiply."""
        return self.takes_codes and weight.qweight.dtype == torch.float8_e4m3fn and weight.shape[1] % GROUP == 0

    def _has_products(self, weight: QuantizedWeight | StoredRows, struct: Structure) -> bool:
        """Whether the kernels can multiply this weight's codes: int8 or int4, in contiguous groups of whole lines. Rows
        that become floats in products must not be rounded."""
        if isinstance(weight, StoredRows):
            return self.takes_codes or (self.unpacks_codes and weight.keeps_floats(_rows_of_pairs(struct)))
        is_cut = weight.group_size % self._line != 0 and weight.group_size < weight.shape[1]
        is_integer = weight.qweight.dtype == torch.int8 or weight.is_packed
        return self.takes_codes and is_integer and weight.g_idx is None and not is_cut

    def _pack_elements(self, struct: Structure, weight: Tensor, bias: Tensor | None) -> tuple[object, int]:
        weight_bytes = struct.num_pairs * struct.num_lines * PAIR_LINE_BYTES
        address, owner, num_bytes = self._allocate(struct, weight_bytes, bias)
        struct.weight = address
        self._library.pack_linear(byref(struct), weight.data_ptr(), _address(bias), torch.get_num_threads())
        return owner, num_bytes

    def _pack_codes(self, struct: Structure, weight: QuantizedWeight, bias: Tensor | None) -> tuple[object, int]:
        num_bits, num_groups = (4 if weight.is_packed else 8), weight.scales.shape[1]
        plain = unpack_halves(weight.qweight) if weight.is_packed else weight.qweight.view(torch.uint8) ^ ZERO_CODE
        has_halves = num_groups > 1
        numbers = {  # for each output and group
            "halves" if has_halves else "scales": weight.scales.to(torch.float16 if has_halves else torch.float32),
            "zeros": weight.zeros,
            "mins": None if weight.mins is None else weight.mins.half(),
        }
        present = {name: each.contiguous() for name, each in numbers.items() if each is not None}
        sizes = {name: each.itemsize for name, each in present.items()}
        group_lines = struct.num_lines if num_groups == 1 else weight.group_size // self._line
        layout = _Layout(num_bits, num_groups, group_lines, sizes, weight.levels)
        owner, num_bytes = self._allocate_codes(struct, [(0, layout)], bias)
        plain = plain.contiguous()
        given = c.PlainCodes(codes=plain.data_ptr(), **{name: each.data_ptr() for name, each in present.items()})
        self._library.pack_codes(byref(struct), byref(given), torch.get_num_threads())
        self._pack_bias(struct, bias)
        return owner, num_bytes

    def _pack_rows(self, struct: Structure, rows: StoredRows, bias: Tensor | None) -> tuple[object, int]:
        forms = [*rows.known_forms, INT8]
        by_pair: list[int] = rows.joint_forms(_rows_of_pairs(struct)).tolist()
        starts = [pair for pair, form in enumerate(by_pair) if pair == 0 or form != by_pair[pair - 1]]
        parts = [(pair, self._layout_of(forms[by_pair[pair]], struct)) for pair in starts]
        owner, num_bytes = self._allocate_codes(struct, parts, bias)
        addresses, kinds = rows.addresses.contiguous(), rows.kinds.contiguous()
        is_by_row = forms[0].is_by_row
        given = c.StoredRows(rows=addresses.data_ptr(), kinds=kinds.data_ptr(), is_by_row=is_by_row)
        self._library.pack_blocks(byref(struct), byref(given), torch.get_num_threads())
        self._pack_bias(struct, bias)
        return owner, num_bytes

    def _layout_of(self, form: CodeForm, struct: Structure) -> _Layout:
        size = GROUP
        if form.multiples:
            size = BLOCK
        num_groups = 1 if form.is_by_row else struct.num_inputs // size
        sizes = {"halves": 2} if num_groups > 1 or form.multiples else {"scales": 4}
        if form.has_zeros:
            sizes["zeros"] = 1
        if form.has_mins:
            sizes["mins"] = 2
        group_lines = struct.num_lines if num_groups == 1 else size // self._line
        return _Layout(form.num_bits, num_groups, group_lines, sizes, form.levels, form.multiples)

    def _allocate_codes(
        self, struct: Structure, parts: list[tuple[int, _Layout]], bias: Tensor | None
    ) -> tuple[object, int]:
        """Allocate the codes and numbers of parts, each given with its first pair of tiles; set struct.parts. Return
        the owner of the memory and the number of bytes."""
        num_bytes = 0
        begins: list[dict[str, int]] = []
        ends = [*(first for first, _ in parts[1:]), struct.num_pairs]
        for (first, layout), end in zip(parts, ends, strict=True):
            begins.append({"codes": num_bytes})
            num_bytes += (end - first) * struct.num_lines * PAIR_LINE_BYTES * layout.num_bits // 16
            for name, size in layout.sizes.items():
                begins[-1][name] = num_bytes
                num_bytes += (end - first) * layout.num_groups * PAIR_OUTPUTS * size
            if layout.multiples:
                begins[-1]["multiples"] = num_bytes
                num_bytes += (end - first) * struct.num_lines * PAIR_OUTPUTS * 2
            num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        address, owner, num_bytes = self._allocate(struct, num_bytes, bias)
        codes = (c.Codes * len(parts))()
        kept: list[object] = []
        for part, (first, layout), begin in zip(codes, parts, begins, strict=True):
            part.first_pair = first
            part.num_bits = layout.num_bits
            part.num_groups = layout.num_groups
            part.group_lines = layout.group_lines
            part.multiples_kind = layout.multiples
            for name, offset in begin.items():
                setattr(part, name, address + offset)
            if layout.levels is not None:
                levels = (c_uint8 * 16)(*(level + ZERO_CODE for level in layout.levels))
                part.levels = addressof(levels)
                kept.append(levels)
        struct.parts, struct.num_parts = addressof(codes), len(parts)
        return (owner, codes, kept), num_bytes

    def _pack_bias(self, struct: Structure, bias: Tensor | None) -> None:
        if bias is not None:
            self._library.pack_linear(byref(struct), None, _address(bias), torch.get_num_threads())

    def _allocate(self, struct: Structure, num_bytes: int, bias: Tensor | None) -> tuple[int, object, int]:
        """Allocate `num_bytes` and, after them, room for the bias; return the address, the memory's owner and the total
        number of bytes."""
        bias_bytes = 0 if bias is None else struct.num_pairs * 4 * PAIR_OUTPUTS
        address, owner = self._memory.allocate(num_bytes + bias_bytes)
        struct.bias = None if bias is None else address + num_bytes
        return address, owner, num_bytes + bias_bytes


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows_of_pairs(struct: Structure) -> Tensor:
    """Return the rows of the outputs of each pair of tiles, the last row for outputs that do not exist: [num_pairs, 32]
    int64."""
    outputs = torch.arange(PAIR_OUTPUTS)
    last = int(struct.num_outputs) - 1
    size = PAIR_OUTPUTS // 2 if struct.is_gated else PAIR_OUTPUTS
    firsts = torch.arange(0, struct.num_pairs * size, size)[:, None]
    return (firsts + outputs % size).clamp(max=last) + outputs // size * (last + 1)
