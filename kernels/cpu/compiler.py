"""Compilation of the C sources in this folder to one shared library per instruction level and element type.

A level is a set of instructions for which the kernels have code of their own. A library's digest covers its sources and
flags. Knows neither this processor nor where libraries are stored. Imports only the standard library, because setup.py
uses it to build wheels.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
COMPILE_TIMEOUT_S = 120

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-pipe")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
LEVELS = {  # compiler flags by name, best level first
    "AMX": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    "AVX512-BF16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "AVX-512": _AVX512,
    # Without -fno-ivopts the compiler spills the sums of linear.c's inner loops to memory.
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-fno-ivopts"),
}
FOR_ANY_MACHINE = ("-mtune=generic", "-s")  # for a library in a wheel
FOR_THIS_MACHINE = ("-mtune=native",)
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Unavailable(Exception):
    """Error that says why the C kernels cannot be used on this machine. Plain torch is used instead."""


def find_compiler() -> str | None:
    """Return the path of cc, else of gcc, else None."""
    return shutil.which("cc") or shutil.which("gcc")


def library_digest(
    level: str, is_bf16: bool, tuning: Sequence[str], compiler: str = "", folder: Path = SOURCE_FOLDER
) -> str:
    """Return 32 hex digits: a hash of the sources, the flags and, if given, the compiler. OSError if a file is
    missing."""
    known: tuple[object, ...] = (_flags(level, is_bf16), tuple(tuning))
    if compiler:
        real = os.path.realpath(compiler)
        status = os.stat(real)  # identifies the compiler's version without running it
        known += (real, status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(repr(known).encode())
    for path in sorted(folder.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def compile_library(
    compiler: str, level: str, is_bf16: bool, tuning: Sequence[str], target: Path, folder: Path = SOURCE_FOLDER
) -> None:
    """Compile the sources in `folder` to `target`. Raises Unavailable if the compiler fails or takes more than
    COMPILE_TIMEOUT_S, OSError if the disk is full or read-only."""
    flags = (*_flags(level, is_bf16), *tuning)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".objects-", ignore_cleanup_errors=True) as scratch:
        sources = sorted(folder.glob("*.c"))
        objects = [os.path.join(scratch, f"{source.stem}.o") for source in sources]
        pairs = zip(map(str, sources), objects, strict=True)
        commands = [[compiler, *flags, "-c", source, "-o", made] for source, made in pairs]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda command: _run(command, scratch), commands))
        # Linked without OpenMP, so that its symbols resolve to the copy that torch has loaded.
        strip = [flag for flag in tuning if flag == "-s"]
        _run([compiler, "-shared", *strip, *objects, "-o", str(target)], scratch)


def _flags(level: str, is_bf16: bool) -> tuple[str, ...]:
    return (*_FLAGS, *LEVELS[level], *(("-DELEMENT_BF16",) if is_bf16 else ()))


def _run(command: list[str], scratch: str) -> None:
    """Run the compiler with English messages and its temporary files in `scratch`. Raises Unavailable if it fails or
    takes too long, OSError if the disk is full or read-only."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": scratch}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s") from None
    if done.returncode == 0:
        return
    for number in _STORAGE_ERRORS:
        if os.strerror(number) in done.stderr:
            raise OSError(number, os.strerror(number), scratch)
    words = (done.stderr.strip().splitlines() or ["no message"])[0]
    raise Unavailable(f"{command[0]} failed with exit code {done.returncode}: {words}")
