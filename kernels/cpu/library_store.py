"""Where compiled libraries lie: those that came with the package, and those that were compiled into a cache folder.

A wheel holds a library for each level and element type in `prebuilt/`, and beside them the digest of the sources and
flags that each was made from: a library fits as long as the sources are the same. In a cache folder a library lies
under a digest that counts the compiler too, so that a change of any makes a new one; a finished one appears by a
rename. Knows neither this processor nor what is in a library.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from .compiler import (
    COMPILE_TIMEOUT_S,
    FOR_ANY_MACHINE,
    FOR_THIS_MACHINE,
    LEVELS,
    SOURCE_FOLDER,
    Unavailable,
    compile_library,
    find_compiler,
    library_digest,
)

PREBUILT_FOLDER = SOURCE_FOLDER / "prebuilt"
DIGESTS_NAME = "digests.json"
LIBRARY_NAME = "kernels.so"
MOST_LIBRARIES = 16  # kept in a cache folder; older ones go

ELEMENTS = {True: "bfloat16", False: "float32"}  # by is_bf16


def build_prebuilt(folder: Path) -> list[str]:
    """Compile every library of a wheel into `folder`; returns what was left out, and why: nothing is raised for a
    level that this compiler does not know, and without a compiler the folder stays away."""
    compiler = find_compiler()
    if compiler is None:
        return ["there is no C compiler (cc, gcc)"]
    folder.mkdir(parents=True, exist_ok=True)
    digests, left_out = {}, []
    for level in LEVELS:
        for is_bf16, element in ELEMENTS.items():
            name = prebuilt_name(level, is_bf16)
            try:
                compile_library(compiler, level, is_bf16, FOR_ANY_MACHINE, folder / name)
                digests[name] = library_digest(level, is_bf16, FOR_ANY_MACHINE)
            except Unavailable as error:
                left_out.append(f"{level} for {element}: {error}")
    (folder / DIGESTS_NAME).write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return left_out


def prebuilt_name(level: str, is_bf16: bool) -> str:
    return f"{level.lower()}-{ELEMENTS[is_bf16]}.so"


def prebuilt_library(level: str, is_bf16: bool, folder: Path) -> Path | None:
    """Path of the library in `folder` that came with the package; None if none did, or the sources have changed."""
    path = folder / prebuilt_name(level, is_bf16)
    try:
        digests = json.loads((folder / DIGESTS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_same = digests.get(path.name) == library_digest(level, is_bf16, FOR_ANY_MACHINE)
    return path if is_same and path.is_file() else None


def cached_library(level: str, is_bf16: bool, root: Path) -> Path:
    """Path of the library in a cache folder, compiled if it is not there.

    Raises Unavailable without a compiler that can, OSError if the folder cannot be used.
    """
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("there is no C compiler (cc, gcc): install one, or tokenloom from a wheel with kernels")
    folder = root / library_digest(level, is_bf16, FOR_THIS_MACHINE, compiler)
    if not (folder / LIBRARY_NAME).exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".build-", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "library"
            made.mkdir()
            compile_library(compiler, level, is_bf16, FOR_THIS_MACHINE, made / LIBRARY_NAME)
            try:
                made.rename(folder)
            except OSError:
                if not (folder / LIBRARY_NAME).exists():  # else another process was faster
                    raise
        _drop_old(root)
    return folder / LIBRARY_NAME


def user_cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/tokenloom, or ~/.cache/tokenloom; None for a user without a home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "tokenloom"
    except RuntimeError:
        return None


def _drop_old(root: Path) -> None:
    """Libraries beyond the newest few, and what killed compilations left."""
    for scratch in root.glob(".build-*"):
        if time.time() - scratch.stat().st_mtime > 10 * COMPILE_TIMEOUT_S:
            shutil.rmtree(scratch, ignore_errors=True)
    libraries = sorted(root.glob(f"*/{LIBRARY_NAME}"), key=lambda path: path.stat().st_mtime)
    for library in libraries[:-MOST_LIBRARIES]:
        shutil.rmtree(library.parent, ignore_errors=True)
