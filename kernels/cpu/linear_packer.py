"""LinearPacker: packs the weights of linear layers for linear.c, as elements or as codes of 8 or 4 bits."""

from __future__ import annotations

from ctypes import Structure, addressof, byref, c_uint8
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Activation
from ..quantized import QuantizedWeight, Weight, as_floats, unpack_halves
from ..stored_rows import GROUP, StoredRows
from . import library as c
from .arena import PackedMemory

PAIR_OUTPUTS = 32  # outputs of a pair of tiles (see kernels.h)
PAIR_LINE_BYTES = 2048  # bytes of a pair of tiles that holds elements
ZERO_CODE = 128  # the 8-bit code of 0


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
        support that; scales of groups are then in half precision. All other quantized weights are dequantized."""
        self._library, self._memory = library, PackedMemory()
        self._line = int(library.op_line())
        self.takes_codes = has_integer_products and bool(library.op_has_codes())

    def pack(self, weight: Weight, bias: Tensor | None, activation: Activation) -> CpuLinear:
        """Pack a weight [out, in] and a bias [out]. A gated weight has all gates, then all ups."""
        if isinstance(weight, Tensor) or not self._has_products(weight):
            weight = as_floats(weight).contiguous()
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
        bias = None if bias is None else bias.contiguous()
        if isinstance(weight, StoredRows):
            owner, num_bytes = self._pack_rows(struct, weight, bias)
        elif isinstance(weight, QuantizedWeight):
            owner, num_bytes = self._pack_codes(struct, weight, bias)
        else:
            owner, num_bytes = self._pack_elements(struct, weight, bias)
        return CpuLinear(struct, owner, num_inputs, num_outputs, num_bytes)

    def _has_products(self, weight: QuantizedWeight | StoredRows) -> bool:
        """Whether the kernels can multiply this weight's codes: int8 or int4, in contiguous groups of whole lines."""
        if isinstance(weight, StoredRows):
            return self.takes_codes
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
        owner, num_bytes = self._allocate_codes(struct, num_bits, num_groups, group_lines, sizes, weight.levels, bias)
        plain = plain.contiguous()
        given = c.PlainCodes(codes=plain.data_ptr(), **{name: each.data_ptr() for name, each in present.items()})
        self._library.pack_codes(byref(struct), byref(given), torch.get_num_threads())
        self._pack_bias(struct, bias)
        return owner, num_bytes

    def _pack_rows(self, struct: Structure, rows: StoredRows, bias: Tensor | None) -> tuple[object, int]:
        form, num_groups = rows.form, rows.num_groups
        sizes = {"halves": 2} if num_groups > 1 else {"scales": 4}
        if form.has_zeros:
            sizes["zeros"] = 1
        if form.has_mins:
            sizes["mins"] = 2
        group_lines = struct.num_lines if num_groups == 1 else GROUP // self._line
        owner, num_bytes = self._allocate_codes(
            struct, form.num_bits, num_groups, group_lines, sizes, form.levels, bias
        )
        addresses, kinds = rows.addresses.contiguous(), rows.kinds.contiguous()
        given = c.StoredRows(rows=addresses.data_ptr(), kinds=kinds.data_ptr(), is_by_row=form.is_by_row)
        self._library.pack_blocks(byref(struct), byref(given), torch.get_num_threads())
        self._pack_bias(struct, bias)
        return owner, num_bytes

    def _allocate_codes(
        self,
        struct: Structure,
        num_bits: int,
        num_groups: int,
        group_lines: int,
        sizes: dict[str, int],
        levels: tuple[int, ...] | None,
        bias: Tensor | None,
    ) -> tuple[object, int]:
        """Allocate codes and, behind them, the numbers of each output and group, named as in Codes and with the given
        sizes in bytes; set struct.codes. Return the owner of the memory and the number of bytes."""
        begins, num_bytes = {}, struct.num_pairs * struct.num_lines * PAIR_LINE_BYTES * num_bits // 16
        for name, size in sizes.items():
            begins[name] = num_bytes
            num_bytes += struct.num_pairs * num_groups * PAIR_OUTPUTS * size
        address, owner, num_bytes = self._allocate(struct, num_bytes, bias)
        stored_levels = None if levels is None else (c_uint8 * 16)(*(level + ZERO_CODE for level in levels))
        codes = c.Codes(
            codes=address,
            num_groups=num_groups,
            group_lines=group_lines,
            num_bits=num_bits,
            levels=None if stored_levels is None else addressof(stored_levels),
            **{name: address + begin for name, begin in begins.items()},
        )
        struct.codes = addressof(codes)
        return (owner, codes, stored_levels), num_bytes

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
