"""The compiler of the C kernels: sources beside this file become one shared library for an element type, once.

The library lies in the user's cache folder under a hash of the sources, the flags and the compiler, so that a change
of any makes a new one; a finished one appears by a rename. Knows what instructions this processor has and which flags
ask for them; knows nothing of what the kernels do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
LIBRARY_NAME = "kernels.so"
COMPILE_TIMEOUT_S = 120
MOST_LIBRARIES = 16  # kept in the cache folder; older ones go

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-mtune=native")
_LEVELS = (  # best first: what it is called, what /proc/cpuinfo must list, what the compiler is told
    (
        "AMX",
        {"amx_tile", "amx_bf16", "avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    (
        "AVX512-BF16",
        {"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx512bf16"),
    ),
    (
        "AVX-512",
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    ),
    # Given its choice of loop counters, the compiler keeps sums of the inner loops of linear.c in memory.
    ("AVX2", {"avx2", "fma"}, ("-mavx2", "-mfma", "-fno-ivopts")),
)

_ARCH_PRCTL = 158  # system call on x86-64
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


class Unavailable(Exception):
    """Why there is no library here; the reference takes its place."""


def instruction_levels() -> list[str]:
    """The names of the levels that this processor and kernel allow, best first; asks for the use of AMX tiles."""
    if platform.machine() != "x86_64":
        return []
    flags = _processor_flags()
    names = [name for name, needed, _ in _LEVELS if needed <= flags]
    if "AMX" in names and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        names.remove("AMX")
    return names


def compiled_library(is_bf16: bool, level: str, cache_folder: Path | None = None) -> Path:
    """Path of the library for this element type and level, compiled if the cache lacks it. Raises Unavailable."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("there is no C compiler (cc, gcc)")
    flags = (*_FLAGS, *next(flags for name, _, flags in _LEVELS if name == level))
    if is_bf16:
        flags += ("-DELEMENT_BF16",)
    try:
        root = cache_folder or Path.home() / ".cache" / "tokenloom"
        folder = root / _digest(compiler, flags)
        if not (folder / LIBRARY_NAME).exists():
            root.mkdir(parents=True, exist_ok=True)
            _build(compiler, flags, folder)
            _drop_old(root)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        raise Unavailable(f"the cache folder cannot be used: {error}") from None
    return folder / LIBRARY_NAME


def _processor_flags() -> set[str]:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("flags"):
                return set(line.split(":", 1)[1].split())
    return set()


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    real = os.path.realpath(compiler)
    status = os.stat(real)  # its version, without starting it
    digest = hashlib.sha256(repr((real, status.st_size, status.st_mtime_ns, flags)).encode())
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _build(compiler: str, flags: tuple[str, ...], folder: Path) -> None:
    """Compile into a folder beside `folder` and rename it."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-", ignore_cleanup_errors=True) as scratch:
        sources = sorted(SOURCE_FOLDER.glob("*.c"))
        objects = [os.path.join(scratch, f"{source.stem}.o") for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", target] for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        made = Path(scratch) / "library"
        made.mkdir()
        # Linked without OpenMP: its symbols are to be found in the copy that torch has loaded.
        _run([compiler, "-shared", *objects, "-o", str(made / LIBRARY_NAME)])
        try:
            made.rename(folder)
        except OSError:
            if not (folder / LIBRARY_NAME).exists():  # else another process was faster
                raise


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise Unavailable(f"{command[0]} failed with exit code {done.returncode}: {words}")


def _drop_old(root: Path) -> None:
    """Libraries beyond the newest few, and what killed compilations left."""
    for scratch in root.glob(".build-*"):
        if time.time() - scratch.stat().st_mtime > 10 * COMPILE_TIMEOUT_S:
            shutil.rmtree(scratch, ignore_errors=True)
    libraries = sorted(root.glob(f"*/{LIBRARY_NAME}"), key=lambda path: path.stat().st_mtime)
    for library in libraries[:-MOST_LIBRARIES]:
        shutil.rmtree(library.parent, ignore_errors=True)
