"""KernelLibrary: the compiled kernels as Python functions, and the C structs that they take.

Every call releases the GIL. The threads are those of the OpenMP library that torch has loaded: it is opened once more,
for all to see, before the kernels are.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

from ..ops import AttentionMetadata
from .compiler import Unavailable


class Rows(Structure):
    """See kernels.h, as for all structs here."""

    _fields_ = (("data", c_void_p), ("stride", c_int64), ("panel_rows", c_int64))


class Linear(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("num_lines", c_int64),
        ("num_pairs", c_int64),
        ("is_gated", c_int32),
    )


STORE, STORE_FLOAT = 0, 1


class Output(Structure):
    _fields_ = (("kind", c_int), ("target", Rows))


class Cache(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class Heads(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("stride", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class HeadWork(Structure):
    _fields_ = (
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("eps", c_float),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
    )


class StepRows(Structure):
    _fields_ = (
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("seq_lens", c_void_p),
        ("query_starts", c_void_p),
        ("num_rows", c_int64),
    )


class Layer(Structure):
    _fields_ = (
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int64),
    )


class Decoder(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("final_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("packed_table", POINTER(Linear)),
        ("table", c_void_p),
        ("num_ids", c_int64),
        ("head", POINTER(Linear)),
        ("is_deterministic", c_int32),
    )


class Step(Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
        ("rows", StepRows),
        ("kv_cache", c_void_p),
        ("block_size", c_int64),
        ("hidden", c_void_p),
        ("chosen", c_void_p),
        ("num_chosen", c_int64),
        ("logits", c_void_p),
    )


def step_rows(metadata: AttentionMetadata) -> StepRows:
    """The rows of a step; the metadata must outlive the answer."""
    return StepRows(
        metadata.block_tables.data_ptr(),
        metadata.block_tables.stride(0),
        metadata.seq_lens.data_ptr(),
        metadata.query_starts.data_ptr(),
        len(metadata.seq_lens_host),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[object, ...]]] = {
    "op_line": (c_int64, ()),
    "op_read": (c_int32, (c_void_p, c_int64, c_int)),
    "linear_num_pairs": (c_int64, (c_int64, c_int32)),
    "pack_linear": (None, (POINTER(Linear), c_void_p, c_void_p, c_int)),
    "op_linear": (None, (POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p, POINTER(Output), c_int)),
    "op_embed_packed": (None, (POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p, c_int)),
    "op_rms_norm": (
        None,
        (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_float, c_int64, c_int64, c_void_p, c_int),
    ),
    "op_prepare_heads": (None, (POINTER(Heads), POINTER(HeadWork), POINTER(Cache), c_int)),
    "make_attention_plan": (c_void_p, (POINTER(StepRows), c_int64, c_int64, c_int64, c_int64, c_int32)),
    "free_attention_plan": (None, (c_void_p,)),
    "op_attend": (None, (c_void_p, c_void_p, c_int64, POINTER(Cache), c_float, c_void_p, c_int64, c_int)),
    "vocabulary_bits": (None, (c_void_p, c_int64, c_uint32, c_uint32, c_uint32, c_uint32)),
    "list_candidates": (
        None,
        (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "decoder_scratch": (c_int64, (POINTER(Decoder), c_int64)),
    "decoder_step": (c_int, (POINTER(Decoder), POINTER(Step), c_void_p, c_int)),
}


class KernelLibrary(ctypes.CDLL):
    """The functions of one compiled library, with their types. torch must have been imported."""

    def __init__(self, path: Path) -> None:
        ctypes.CDLL(str(loaded_openmp()), mode=ctypes.RTLD_GLOBAL)
        super().__init__(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self, name)
            function.restype, function.argtypes = result, arguments


def load_library(path: Path) -> KernelLibrary:
    """Raises Unavailable if it cannot be loaded."""
    try:
        return KernelLibrary(path)
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the compiled library does not load: {error}") from None


def loaded_openmp() -> Path:
    """The GNU OpenMP library that torch computes with, whoever else brought a copy. Raises Unavailable."""
    with open("/proc/self/maps") as file:
        paths = {Path(line.split(maxsplit=5)[5].strip()) for line in file if "libgomp" in line}
    of_torch = {path for path in paths if any(part in ("torch", "torch.libs") for part in path.parts)}
    chosen = of_torch or paths
    if len(chosen) != 1:
        raise Unavailable(f"torch's OpenMP library was sought, {len(chosen)} copies of libgomp are loaded")
    return chosen.pop()
