"""Dequantization of a checkpoint to floats, under the tensor names of an unquantized checkpoint: transformers' models
know no other names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.config.weight_files import stored_tensors
from ...ipc.spec.models.quantization_config import QuantizationConfig
from ...kernels.quantized import as_floats
from ..weights.checkpoint import FLOAT_DTYPES, Checkpoint, TensorSlice
from ..weights.quantized_weights import CODES_PER_WORD, load_matrix

CPU = torch.device("cpu")
# By layout: the tensor with the codes of a matrix, and the factors by which its two axes are shorter than the matrix's.
CODES = {
    "scaled": ("weight", 1, 1),
    "packed": ("weight_packed", 1, CODES_PER_WORD),
    "gptq": ("qweight", CODES_PER_WORD, 1),
    "awq": ("qweight", 1, CODES_PER_WORD),
}
TRANSPOSED = ("gptq", "awq")  # layouts with codes [in, out]
# Other tensors that are stored for a matrix, or for activations and caches, which we do not quantize.
BESIDE = frozenset(
    "weight_scale weight_scale_inv weight_shape weight_g_idx weight_zero_point input_scale qzeros scales g_idx k_scale "  # noqa: SIM905
    "v_scale input_scale_ub activation_scale".split()
)


def dequantized(folder: Path, quantization: QuantizationConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint in `folder` by name, as floats of `dtype` on the host. A matrix is named
    X.weight.

    ConfigError if the layout is not in CODES (formats of experts only), a tensor holds quantized matrices of several
    experts, or a tensor does not fit the layout.
    """
    if quantization.layout not in CODES:
        raise ConfigError(
            f"{folder}: transformers' layers read no checkpoint in {quantization.weight_dtype}: take that with floats"
        )
    stored = stored_tensors(folder)
    suffix, *factors = CODES[quantization.layout]
    found: dict[str, Tensor] = {}
    with Checkpoint(folder, dtype, CPU, quantization) as checkpoint:
        for name, tensor in stored.items():
            base, _, kind = name.rpartition(".")
            if kind in BESIDE:
                continue
            shape = checkpoint.shape_of(name)
            if kind == suffix and tensor.dtype not in FLOAT_DTYPES:
                if len(shape) != 2:
                    raise ConfigError(
                        f"{folder}: {name} {list(shape)} holds quantized matrices of several experts: transformers' "
                        "layers read them one by one: take the checkpoint with floats"
                    )
                sizes = [size * factor for size, factor in zip(shape, factors, strict=True)]
                whole = (sizes[1], sizes[0]) if quantization.layout in TRANSPOSED else (sizes[0], sizes[1])
                found[f"{base}.weight"] = as_floats(load_matrix(checkpoint, TensorSlice(f"{base}.weight", whole)))
            else:
                found[name] = checkpoint.load(TensorSlice(name, shape))
    return found
