"""Checkpoint: reads slices of the tensors of a safetensors checkpoint, in one file or many.

Files are memory-mapped, so a rank reads only the bytes of its shard. Each slice is copied only once, into the (often
fused) parameter to which it belongs. Knows names and shapes; knows no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.config.weight_files import INDEX_NAME, damaged, file_by_tensor
from ...ipc.spec.models.quantization_config import QuantizationConfig
from ...kernels.quantized import Kind, QuantizedWeight, quantize
from ...kernels.stored_rows import StoredRows

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
TABLES = (".rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".attention.masked_bias")  # constants in old files


@dataclass(frozen=True)
class TensorSlice:
    """Elements `shard` along `axis` of the tensor `name`, which must have shape `shape` in the checkpoint.

    A shard may extend past the tensor's end (for a padded vocabulary); zeros are filled in there. `is_transposed`: the
    file has the matrix as [in, out], with the axes of `shape` swapped.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    shard: range | None = None  # None: the whole tensor
    is_transposed: bool = False

    @property
    def range(self) -> range:
        if not self.shape:
            return range(0)
        return range(self.shape[self.axis]) if self.shard is None else self.shard

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], len(self.range), *self.shape[self.axis + 1 :])


class Checkpoint:
    """An open checkpoint, used as a context manager. `load` converts floats to `dtype`. Reading raises ConfigError if a
    tensor is missing or has another shape or dtype than requested, or a file is missing or damaged."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationConfig | None = None,
        file_by_name: Mapping[str, Path] | None = None,
    ) -> None:
        """`quantization`: the stored layout of matrices, see `quantized_weights.py`. `file_by_name`: the file of each
        tensor; None: find the files in `folder`."""
        self.folder = self.source = folder  # source: the name in error messages
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.on_progress: Callable[[int, int], None] | None = None  # gets (tensors read, all tensors)
        self.quantize: Callable[[Tensor, Kind], QuantizedWeight] = quantize  # for matrices that are quantized on load
        self.keeps_blocks = False  # whether matrices of GGUF files are left in their blocks, see StoredRows
        self._names_read: set[str] = set()
        self._open_files: dict[Path, Any] = {}
        self._file_by_name = file_by_tensor(folder) if file_by_name is None else file_by_name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_by_name

    def load(self, *slices: TensorSlice, dtype: torch.dtype | None = None) -> Tensor:
        """Read the slices and concatenate them along axis 0, as one new tensor of `dtype`, by default `self.dtype`."""
        rows = [wanted.part_shape[0] for wanted in slices]
        shape = (sum(rows), *slices[0].part_shape[1:])
        parameter = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        for wanted, target in zip(slices, torch.split(parameter, rows), strict=True):
            self._read(wanted, target)
        return parameter

    def load_stored(self, wanted: TensorSlice, dtypes: Sequence[str], device: torch.device | None = None) -> Tensor:
        """Read a slice in its stored dtype, which must be one of `dtypes` (safetensors' names).

        The shard must be within the tensor: nothing is padded. `device`: None for the checkpoint's device.
        """
        index = (slice(None),) * wanted.axis + (slice(wanted.range.start, wanted.range.stop),)
        source = self._slice(wanted, dtypes)
        stored: Tensor = source[index] if wanted.shape else source[...]
        return stored.to(device or self.device)

    def load_rows(self, wanted: TensorSlice) -> StoredRows | None:
        """Return rows of a matrix as they are stored in blocks, to be packed for a head or as an embedding's
        table; None if the files have no blocks."""
        del wanted
        return None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name)[1].get_shape())

    def refuse_unread(self, ignored: Iterable[str], is_spare: Callable[[str], bool]) -> None:
        """Raise ConfigError if nothing was read of a tensor, unless its name begins with one of `ignored` or `is_spare`
        returns true for it."""
        unread = self._file_by_name.keys() - self._names_read
        asked = (name for name in unread if not name.startswith(tuple(ignored)) and not name.endswith(TABLES))
        unknown = sorted(name for name in asked if not is_spare(name))
        if unknown:
            others = f" and for {len(unknown) - 1} others" if len(unknown) > 1 else ""
            raise ConfigError(
                f"{self.source}: the model in config.json has no place for tensor {unknown[0]}{others}: the checkpoint "
                "does not fit its config.json"
            )

    def _read(self, wanted: TensorSlice, target: Tensor) -> None:
        source = self._slice(wanted, FLOAT_DTYPES)
        start, stop = wanted.range.start, min(wanted.range.stop, wanted.shape[wanted.axis])
        num_real = max(0, stop - start)
        if num_real:
            stored_axis = 1 - wanted.axis if wanted.is_transposed else wanted.axis
            index = (slice(None),) * stored_axis + (slice(start, stop),)
            stored = source[index].T if wanted.is_transposed else source[index]
            target.narrow(wanted.axis, 0, num_real).copy_(stored)
        target.narrow(wanted.axis, num_real, len(wanted.range) - num_real).zero_()

    def _slice(self, wanted: TensorSlice, dtypes: Sequence[str]) -> Any:
        """Check shape and dtype of the tensor, report progress, and return safetensors' lazy slice of the whole tensor.
        ConfigError if shape or dtype differ."""
        path, source = self._find(wanted.name)
        self._note_read(wanted.name)
        shape, dtype = tuple(source.get_shape()), source.get_dtype()
        if shape != (wanted.shape[::-1] if wanted.is_transposed else wanted.shape):
            raise ConfigError(
                f"{path}: tensor {wanted.name} has shape {list(shape)}, config.json asks for {list(wanted.shape)}: "
                "the two belong to different models"
            )
        if dtype not in dtypes:
            raise ConfigError(
                f"{path}: tensor {wanted.name} is {dtype}, only {', '.join(dtypes)} can be used here: config.json's "
                "quantization_config does not fit, or this tensor may not be quantized"
            )
        return source

    def _note_read(self, name: str) -> None:
        self._names_read.add(name)
        if self.on_progress is not None:
            self.on_progress(len(self._names_read), len(self._file_by_name))

    def _find(self, name: str) -> tuple[Path, Any]:
        path = self._file_by_name.get(name)
        if path is None:
            raise ConfigError(
                f"{self.folder}: tensor {name} is missing, among {len(self._file_by_name)} in its safetensors "
                "files: the checkpoint does not fit its config.json or is incomplete"
            )
        try:
            return path, self._open(path).get_slice(name)
        except SafetensorError:
            raise ConfigError(
                f"{path} does not hold tensor {name}, {INDEX_NAME} says it does: fetch both files again"
            ) from None

    def _open(self, path: Path) -> Any:
        file = self._open_files.get(path)
        if file is None:
            try:
                file = self._open_files[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ConfigError(
                    f"{path} does not exist, {INDEX_NAME} lists it: the download is incomplete, fetch the file again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise damaged(path, error) from None
        return file
