"""The compiler of the C kernels: sources beside this file become one shared library for a level and an element type.

A level is a set of instructions that the kernels are written for. Knows which flags ask a compiler for a level, and
gives each library a digest of its sources and flags. Knows neither this processor nor where libraries are kept; imports
the standard library alone, since a build of the wheel runs it too.
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
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
LEVELS = {  # best first, by name: what the compiler is told
    "AMX": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "AVX512-BF16": (*_AVX512, "-mavx512bf16"),
    "AVX-512": _AVX512,
    # Given its choice of loop counters, the compiler keeps sums of the inner loops of linear.c in memory.
    "AVX2": ("-mavx2", "-mfma", "-fno-ivopts"),
}
FOR_ANY_MACHINE = ("-mtune=generic", "-s")  # a library that is shipped
FOR_THIS_MACHINE = ("-mtune=native",)
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Unavailable(Exception):
    """The reason why there is no library here; the reference takes its place."""


def find_compiler() -> str | None:
    """Path of the C compiler."""
    return shutil.which("cc") or shutil.which("gcc")


def library_digest(level: str, is_bf16: bool, tuning: Sequence[str], compiler: str = "") -> str:
    """A name for the library that these sources and flags make, and this compiler if one is given."""
    known: tuple[object, ...] = (_flags(level, is_bf16), tuple(tuning))
    if compiler:
        real = os.path.realpath(compiler)
        status = os.stat(real)  # its version, without starting it
        known += (real, status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(repr(known).encode())
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def compile_library(compiler: str, level: str, is_bf16: bool, tuning: Sequence[str], target: Path) -> None:
    """Write the library to `target`. Raises Unavailable if the compiler cannot, OSError if the disk cannot."""
    flags = (*_flags(level, is_bf16), *tuning)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".objects-", ignore_cleanup_errors=True) as scratch:
        sources = sorted(SOURCE_FOLDER.glob("*.c"))
        objects = [os.path.join(scratch, f"{source.stem}.o") for source in sources]
        pairs = zip(map(str, sources), objects, strict=True)
        commands = [[compiler, *flags, "-c", source, "-o", made] for source, made in pairs]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda command: _run(command, scratch), commands))
        # Linked without OpenMP: its symbols are to be found in the copy that torch has loaded.
        strip = [flag for flag in tuning if flag == "-s"]
        _run([compiler, "-shared", *strip, *objects, "-o", str(target)], scratch)


def _flags(level: str, is_bf16: bool) -> tuple[str, ...]:
    return (*_FLAGS, *LEVELS[level], *(("-DELEMENT_BF16",) if is_bf16 else ()))


def _run(command: list[str], scratch: str) -> None:
    """The compiler's words are read in English, and its own files go to `scratch`: no other folder need be writable."""
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
