"""KernelLibrary: ctypes bindings of the compiled kernels and of the C structs that are their arguments.

Both are parsed from the C sources in this folder, so that no layout is declared twice. Pointers are plain addresses;
callers keep the memory alive. Every call releases the GIL. The kernels run on the threads of torch's OpenMP library,
which is opened with global symbols before they are loaded.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import Structure
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from ..contract import ActivationKind, AttentionMetadata, ScoreKind, StateKind
from .compiler import SOURCE_FOLDER, Unavailable

_SCALARS: dict[str, type] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "uint8_t": ctypes.c_uint8,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "OutputKind": ctypes.c_int,
    "ActivationKind": ctypes.c_int,
    "NormKind": ctypes.c_int,
    "CacheKind": ctypes.c_int,
    "ScoreKind": ctypes.c_int,
    "MixerKind": ctypes.c_int,
}
STORE, STORE_FLOAT = 0, 1  # values of OutputKind in C
_CACHES = {torch.int8: 1, torch.uint8: 2}  # CacheKind of a cache of bytes
ACTIVATIONS = {kind: number for number, kind in enumerate(get_args(ActivationKind))}
MIXERS = {kind: number for number, kind in enumerate(get_args(StateKind))}
SCORES = {kind: number for number, kind in enumerate(get_args(ScoreKind))}
_SOURCES = {
    path.name: re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    for path in SOURCE_FOLDER.glob("*.[ch]")
}


def _struct(source: str, name: str) -> type[Structure]:
    """Parse the C struct `name` of a source file and return its ctypes class. Structs that it contains by value must be
    parsed before it."""
    found = re.search(rf"typedef struct {{([^}}]*)}} {name};", _SOURCES[source])
    assert found is not None, f"{source} has no struct {name}"
    fields = []
    for declaration in found[1].split(";")[:-1]:
        words, *others = re.sub(r"\bconst\b", "", declaration).split(",")
        base, first = words.split(maxsplit=1)
        for declarator in (first, *others):
            is_pointer = "*" in declarator
            fields.append((declarator.strip(" *"), ctypes.c_void_p if is_pointer else _SCALARS[base]))
    _SCALARS[name] = type(name, (Structure,), {"_fields_": fields})
    return _SCALARS[name]


Rows = _struct("kernels.h", "Rows")
Codes = _struct("kernels.h", "Codes")
Linear = _struct("kernels.h", "Linear")
PlainCodes = _struct("codes.c", "PlainCodes")
StoredRows = _struct("blocks.c", "StoredRows")
StoredTable = _struct("kernels.h", "StoredTable")
Output = _struct("kernels.h", "Output")
Adapted = _struct("kernels.h", "Adapted")
LowRankPart = _struct("low_rank.h", "LowRankPart")
Norm = _struct("kernels.h", "Norm")
Delta = _struct("kernels.h", "Delta")
Cache = _struct("kernels.h", "Cache")
Heads = _struct("kernels.h", "Heads")
HeadRules = _struct("kernels.h", "HeadRules")
HeadWork = _struct("kernels.h", "HeadWork")
StepRows = _struct("kernels.h", "StepRows")
Scoring = _struct("kernels.h", "Scoring")
Routing = _struct("experts.h", "Routing")
Experts = _struct("experts.h", "Experts")
Segments = _struct("state.h", "Segments")
Conv = _struct("state.h", "Conv")
Scan = _struct("state.h", "Scan")
GatedNorm = _struct("state.h", "GatedNorm")
Attention = _struct("decoder.h", "Attention")
Rates = _struct("state.h", "Rates")
Mixer = _struct("state.h", "Mixer")
States = _struct("state.h", "States")
Layer = _struct("decoder.h", "Layer")
Decoder = _struct("decoder.h", "Decoder")
Media = _struct("decoder.h", "Media")
CacheGroup = _struct("decoder.h", "CacheGroup")
Step = _struct("decoder.h", "Step")
Draw = _struct("sample.c", "Draw")


def step_rows(metadata: AttentionMetadata) -> Structure:
    """Build the C struct of a step's rows; the caller must keep the metadata alive."""
    return StepRows(
        metadata.block_tables.data_ptr(),
        metadata.block_tables.stride(0),
        metadata.seq_lens.data_ptr(),
        metadata.query_starts.data_ptr(),
        len(metadata.seq_lens_host),
        None if metadata.see_until is None else metadata.see_until.data_ptr(),
        None if metadata.has_drafts is None else metadata.has_drafts.data_ptr(),
        metadata.are_windows_two_sided,
    )


def cache_kind(kv_cache: Tensor) -> int:
    """Return the CacheKind of a cache tensor."""
    return _CACHES.get(kv_cache.dtype, 0)


def _type_of(declaration: str) -> type | None:
    """Return the ctypes type of a C parameter or result; None for void."""
    if "*" in declaration:
        return ctypes.c_void_p
    return _SCALARS.get(declaration.split()[0])


class KernelLibrary(ctypes.CDLL):
    """A loaded library with typed functions. torch must be imported before. See `load_library` for errors."""

    def __init__(self, path: Path) -> None:
        ctypes.CDLL(str(loaded_openmp()), mode=ctypes.RTLD_GLOBAL)
        super().__init__(str(path))
        for source in _SOURCES.values():
            for result, name, parameters in re.findall(r"^EXPORT ([\w ]+[ *])(\w+)\(([^)]*)\)", source, flags=re.M):
                function = getattr(self, name)
                types = [_type_of(parameter.replace("const ", "")) for parameter in parameters.split(",")]
                function.restype, function.argtypes = _type_of(result), [each for each in types if each is not None]


def load_library(path: Path) -> KernelLibrary:
    """Load a library. Raises OSError if the dynamic linker refuses it, Unavailable if it lacks a function of the
    sources or torch's OpenMP library cannot be identified."""
    try:
        return KernelLibrary(path)
    except AttributeError as error:
        raise Unavailable(f"the compiled library lacks a function: {error}") from None


def loaded_openmp() -> Path:
    """Return the path of torch's copy of GNU OpenMP, or of the only copy, among the loaded libraries. Raises
    Unavailable if there is not exactly one."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {Path(line.split(maxsplit=5)[5].strip()) for line in file if "libgomp" in line}
    of_torch = {path for path in paths if any(part in ("torch", "torch.libs") for part in path.parts)}
    chosen = of_torch or paths
    if len(chosen) != 1:
        raise Unavailable(f"cannot tell torch's OpenMP library: {len(chosen)} copies of libgomp are loaded")
    return chosen.pop()
