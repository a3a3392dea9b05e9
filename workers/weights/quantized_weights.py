"""Loading of the matrices of a checkpoint as they are stored: floats, or codes with scales in one of five layouts.

    scaled  weight [out, in] of 8 bits; weight_scale (one, per output or per block) or weight_scale_inv (per block)
    packed  weight_packed [out, in / 8] int32, weight_scale [out, groups], weight_g_idx [in] or none; code 8 is 0
    gptq    qweight [in / 8, out] int32, qzeros [groups, out / 8] int32, scales [groups, out], g_idx [in] or none
    awq     qweight [in, out / 8] int32, qzeros [groups, out / 8] int32, scales [groups, out]; codes are interleaved
    gguf    blocks of codes and scales, see gguf_blocks.py

An int32 holds eight codes, the first in its lowest bits. Knows the tensors of a matrix, and how they are cut to a
rank's shard; knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.models.quantization_config import QuantizationConfig
from ...kernels.quantized import QuantizedWeight, Weight, as_floats, concatenate, from_g_idx
from .checkpoint import FLOAT_DTYPES, Checkpoint, TensorSlice
from .gguf_checkpoint import GgufCheckpoint

HOST = torch.device("cpu")
CODES_PER_WORD = 8  # 4-bit codes in an int32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of the code of each of eight outputs
SCALES = ("weight_scale_inv", "weight_scale")  # names of the scales in the layout "scaled"
STORED_DTYPES = {"fp8": ("F8_E4M3",), "int8": ("I8",)}
SPARE = (  # tensors for quantized activations and KV caches, and a shape that config.json implies
    *(
        ".input_scale",
        ".input_scale_ub",
        ".input_zero_point",
        ".activation_scale",
        ".output_scale",
        ".output_zero_point",
    ),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".weight_shape"),
)
SPARE_ZEROS = (".bias", ".weight_zero_point")  # tensors of zeros that some writers store for each quantized matrix


def load_matrix(checkpoint: Checkpoint, *slices: TensorSlice) -> Weight:
    """Read slices of `NAME.weight` [out, in] and concatenate them along axis 0. The result is quantized if all slices
    are or if the checkpoint is quantized on load; if only some slices are quantized, these become floats."""
    config = checkpoint.quantization
    if isinstance(checkpoint, GgufCheckpoint) and config is not None and config.layout == "gguf":
        return checkpoint.load_matrix(*slices)
    if isinstance(checkpoint, GgufCheckpoint) and config is None:
        rows = checkpoint.load_blocks(*slices)
        return checkpoint.load(*slices) if rows is None else rows
    if config is None or config.layout in ("on_load", "mxfp4"):  # mxfp4 is a layout of experts only
        return quantize_on_load(checkpoint, checkpoint.load(*slices))
    parts = [_read(checkpoint, config, _Matrix.of(wanted)) for wanted in slices]
    quantized = [part for part in parts if part is not None]
    if len(quantized) == len(parts):
        return concatenate(quantized)
    if not quantized:
        return checkpoint.load(*slices)
    return torch.cat(
        [
            checkpoint.load(wanted) if part is None else as_floats(part)
            for wanted, part in zip(slices, parts, strict=True)
        ]
    )


def is_spare(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor of a quantized checkpoint is not needed: its name ends in one of SPARE, or in one of
    SPARE_ZEROS and all its elements are 0."""
    config = checkpoint.quantization
    if config is None or config.layout not in _READERS:
        return False
    if name.endswith(SPARE):
        return True
    matrix = name.rpartition(".")[0]
    if not name.endswith(SPARE_ZEROS) or not _is_quantized(checkpoint, config, matrix):
        return False
    stored = checkpoint.load_stored(TensorSlice(name, checkpoint.shape_of(name)), (*FLOAT_DTYPES, "I8", "I32"))
    return not bool(stored.any())


def quantize_on_load(checkpoint: Checkpoint, weight: Tensor) -> Weight:
    """Return a float matrix, quantized if the configuration's layout is "on_load"."""
    config = checkpoint.quantization
    if config is None or config.layout != "on_load":
        return weight
    assert config.weight_dtype != "mxfp4"
    return checkpoint.quantize(weight, config.weight_dtype)


@dataclass(frozen=True)
class _Matrix:
    """A shard of the [num_rows, num_columns] matrix `name`: its outputs `rows` and inputs `columns`, one of which are
    complete."""

    name: str
    num_rows: int
    num_columns: int
    rows: range
    columns: range

    @classmethod
    def of(cls, wanted: TensorSlice) -> _Matrix:
        num_rows, num_columns = wanted.shape
        rows = wanted.range if wanted.axis == 0 else range(num_rows)
        columns = wanted.range if wanted.axis == 1 else range(num_columns)
        return cls(wanted.name.removesuffix(".weight"), num_rows, num_columns, rows, columns)

    def wanted(self, suffix: str, shape: tuple[int, ...], axis: int, shard: range) -> TensorSlice:
        return TensorSlice(f"{self.name}.{suffix}", shape, axis, shard)

    def codes(self, suffix: str, shape: tuple[int, int], rows: range, columns: range, row_axis: int = 0) -> TensorSlice:
        """Return the shard's slice of a tensor of codes. rows, columns: the shard in elements of this tensor, which may
        hold several codes each. row_axis: the tensor's axis of outputs."""
        axis, shard = (row_axis, rows) if len(self.rows) < self.num_rows else (1 - row_axis, columns)
        return self.wanted(suffix, shape, axis, shard)


def _read(checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix) -> QuantizedWeight | None:
    """Read a quantized matrix; None if the checkpoint has it as floats."""
    read = _READERS[config.layout][1]
    return read(checkpoint, config, matrix) if _is_quantized(checkpoint, config, matrix.name) else None


def _is_quantized(checkpoint: Checkpoint, config: QuantizationConfig, matrix: str) -> bool:
    return any(f"{matrix}.{name}" in checkpoint for name in _READERS[config.layout][0])


def _read_scaled(checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix) -> QuantizedWeight:
    scale_name = next(name for name in SCALES if f"{matrix.name}.{name}" in checkpoint)
    shape = (matrix.num_rows, matrix.num_columns)
    wanted = matrix.codes("weight", shape, matrix.rows, matrix.columns)
    codes = checkpoint.load_stored(wanted, STORED_DTYPES[config.weight_dtype])
    stored_shape = checkpoint.shape_of(f"{matrix.name}.{scale_name}")
    scales = _floats(checkpoint, f"{matrix.name}.{scale_name}", stored_shape)
    block_rows, block_columns = config.block or (1, matrix.num_columns)
    num_blocks = (-(-matrix.num_rows // block_rows), -(-matrix.num_columns // block_columns))
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(matrix.num_rows, 1)
        block_rows, block_columns = 1, matrix.num_columns
    elif scales.numel() != num_blocks[0] * num_blocks[1]:
        raise ConfigError(
            f"{checkpoint.folder}: {matrix.name}.{scale_name} has shape {list(stored_shape)}, blocks of "
            f"{block_rows} x {block_columns} in {list(shape)} ask for {list(num_blocks)}: config.json is another's"
        )
    else:
        scales = scales.reshape(num_blocks)
    rows = _indices(matrix.rows, codes.device) // block_rows
    return from_g_idx(codes, scales[rows], None, _indices(matrix.columns, HOST) // block_columns, checkpoint.dtype)


def _read_packed(checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix) -> QuantizedWeight:
    shape = (matrix.num_rows, matrix.num_columns // CODES_PER_WORD)
    wanted = matrix.codes("weight_packed", shape, matrix.rows, _aligned(matrix.columns))
    codes = _trim(_unpack(checkpoint.load_stored(wanted, ("I32",))), matrix.columns)
    scales = _floats(checkpoint, f"{matrix.name}.weight_scale", (matrix.num_rows, _num_groups(config, matrix)))
    scales = scales[_indices(matrix.rows, scales.device)]
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    groups = _groups(checkpoint, config, matrix, "weight_g_idx")
    return from_g_idx(codes, scales, zeros, groups, checkpoint.dtype)


def _read_gptq(checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix) -> QuantizedWeight:
    shape = (matrix.num_columns // CODES_PER_WORD, matrix.num_rows)
    wanted = matrix.codes("qweight", shape, matrix.rows, _aligned(matrix.columns), row_axis=1)
    codes = _trim(_unpack(checkpoint.load_stored(wanted, ("I32",)).T), matrix.columns)
    scales, zeros = _read_grid(checkpoint, config, matrix, range(CODES_PER_WORD))
    groups = _groups(checkpoint, config, matrix, "g_idx")
    return from_g_idx(codes, scales, zeros + config.zero_offset, groups, checkpoint.dtype)


def _read_awq(checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix) -> QuantizedWeight:
    shape = (matrix.num_columns, matrix.num_rows // CODES_PER_WORD)
    wanted = matrix.codes("qweight", shape, _aligned(matrix.rows), matrix.columns, row_axis=1)
    codes = _trim(_unpack(checkpoint.load_stored(wanted, ("I32",)), AWQ_ORDER), matrix.rows).T
    scales, zeros = _read_grid(checkpoint, config, matrix, AWQ_ORDER)
    return from_g_idx(codes, scales, zeros, _groups(checkpoint, config, matrix, "g_idx"), checkpoint.dtype)


def _read_grid(
    checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix, order: range | tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Read scales and zero points of gptq and awq, which store them as [groups, out]; return both as [rows, groups]."""
    num_groups = _num_groups(config, matrix)
    zeros_shape = (num_groups, matrix.num_rows // CODES_PER_WORD)
    stored = checkpoint.load_stored(matrix.wanted("qzeros", zeros_shape, 1, _aligned(matrix.rows)), ("I32",))
    scales = checkpoint.load_stored(
        matrix.wanted("scales", (num_groups, matrix.num_rows), 1, matrix.rows), FLOAT_DTYPES
    )
    return scales.T, _trim(_unpack(stored, order), matrix.rows).T


def _num_groups(config: QuantizationConfig, matrix: _Matrix) -> int:
    return 1 if config.group_size is None else -(-matrix.num_columns // config.group_size)


def _groups(checkpoint: Checkpoint, config: QuantizationConfig, matrix: _Matrix, name: str) -> Tensor:
    """Return the group of each input of the shard, on the host: from the tensor `name` if the file has it (act-order),
    else of runs of equal size."""
    if f"{matrix.name}.{name}" in checkpoint:
        stored = matrix.wanted(name, (matrix.num_columns,), 0, matrix.columns)
        return checkpoint.load_stored(stored, ("I32", "I64"), HOST).long()
    return _indices(matrix.columns, HOST) // (config.group_size or matrix.num_columns)


def _unpack(words: Tensor, order: range | tuple[int, ...] = range(CODES_PER_WORD)) -> Tensor:
    """Unpack int32 [n, m] → codes uint8 [n, 8 m]. Code k of a word is in its nibble order[k], counted from the lowest
    bits."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _aligned(shard: range) -> range:
    """Return the indices of the int32 words that hold the codes `shard`."""
    return range(shard.start // CODES_PER_WORD, -(-shard.stop // CODES_PER_WORD))


def _trim(codes: Tensor, shard: range) -> Tensor:
    """Cut the columns that were unpacked from the words `_aligned(shard)` to those of the shard."""
    start = shard.start % CODES_PER_WORD
    return codes[:, start : start + len(shard)]


def _floats(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    return checkpoint.load_stored(TensorSlice(name, shape), FLOAT_DTYPES)


def _indices(shard: range, device: torch.device) -> Tensor:
    return torch.arange(shard.start, shard.stop, device=device)


_Reader: TypeAlias = Callable[[Checkpoint, QuantizationConfig, _Matrix], QuantizedWeight]
_READERS: dict[str, tuple[tuple[str, ...], _Reader]] = {  # by layout; every quantized matrix has one of these tensors
    "scaled": (SCALES, _read_scaled),
    "packed": (("weight_packed",), _read_packed),
    "gptq": (("qweight",), _read_gptq),
    "awq": (("qweight",), _read_awq),
}
