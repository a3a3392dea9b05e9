"""KernelLibrary: the compiled kernels as Python functions, and the C structs that they take.

Both are read from the sources beside this file, which alone say what lies where. A pointer is an address; who passes
one keeps alive what lies there. Every call releases the GIL. The threads are those of the OpenMP library that torch has
loaded: it is opened once more, for all to see, before the kernels are.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import Structure
from pathlib import Path

from ..contract import AttentionMetadata
from .compiler import SOURCE_FOLDER, Unavailable

_SCALARS: dict[str, type] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "OutputKind": ctypes.c_int,
}
STORE, STORE_FLOAT = 0, 1  # of OutputKind
_SOURCES = {
    path.name: re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    for path in SOURCE_FOLDER.glob("*.[ch]")
}


def _struct(source: str, name: str) -> type[Structure]:
    """The struct `name` of a source; what it holds by value was read before."""
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
Linear = _struct("kernels.h", "Linear")
Output = _struct("kernels.h", "Output")
Cache = _struct("kernels.h", "Cache")
Heads = _struct("kernels.h", "Heads")
HeadWork = _struct("kernels.h", "HeadWork")
StepRows = _struct("kernels.h", "StepRows")
Layer = _struct("step.c", "Layer")
Decoder = _struct("step.c", "Decoder")
Step = _struct("step.c", "Step")
Draw = _struct("sample.c", "Draw")


def step_rows(metadata: AttentionMetadata) -> Structure:
    """The rows of a step; the metadata must outlive the answer."""
    return StepRows(
        metadata.block_tables.data_ptr(),
        metadata.block_tables.stride(0),
        metadata.seq_lens.data_ptr(),
        metadata.query_starts.data_ptr(),
        len(metadata.seq_lens_host),
    )


def _type_of(declaration: str) -> type | None:
    """Of a parameter or a function; None: void."""
    if "*" in declaration:
        return ctypes.c_void_p
    return _SCALARS.get(declaration.split()[0])


class KernelLibrary(ctypes.CDLL):
    """The functions of one compiled library, with their types. torch must have been imported."""

    def __init__(self, path: Path) -> None:
        ctypes.CDLL(str(loaded_openmp()), mode=ctypes.RTLD_GLOBAL)
        super().__init__(str(path))
        for source in _SOURCES.values():
            for result, name, parameters in re.findall(r"^EXPORT ([\w ]+[ *])(\w+)\(([^)]*)\)", source, flags=re.M):
                function = getattr(self, name)
                types = [_type_of(parameter.replace("const ", "")) for parameter in parameters.split(",")]
                function.restype, function.argtypes = _type_of(result), [each for each in types if each is not None]


def load_library(path: Path) -> KernelLibrary:
    """Raises OSError if the linker refuses it, Unavailable if it is not what the sources say."""
    try:
        return KernelLibrary(path)
    except AttributeError as error:
        raise Unavailable(f"the compiled library lacks a function: {error}") from None


def loaded_openmp() -> Path:
    """The GNU OpenMP library that torch computes with, whoever else brought a copy. Raises Unavailable."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {Path(line.split(maxsplit=5)[5].strip()) for line in file if "libgomp" in line}
    of_torch = {path for path in paths if any(part in ("torch", "torch.libs") for part in path.parts)}
    chosen = of_torch or paths
    if len(chosen) != 1:
        raise Unavailable(f"torch's OpenMP library was sought, {len(chosen)} copies of libgomp are loaded")
    return chosen.pop()
