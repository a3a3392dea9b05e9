"""Storage of compiled libraries: the prebuilt ones of the package, and those compiled into a cache folder.

A wheel has a library per level and element type in `prebuilt/`, with the digests of their sources and flags; a library
is used only if the digest still matches. In a cache folder the digest, which also covers the compiler, is the name of a
library's folder; a finished library appears there by a rename. Of several processes that lack a library one compiles it
and the others wait. Knows nothing of processors or of the functions.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
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
MAX_LIBRARIES = 16  # in a cache folder; older ones are deleted

_DIGEST = re.compile("[0-9a-f]{16,}")  # the name of a library's folder
ELEMENTS = {True: "bfloat16", False: "float32"}  # by is_bf16


def build_prebuilt(folder: Path, announce: Callable[[str], None] = lambda line: None) -> list[str]:
    """Compile every library of a wheel into `folder`; return an error line for each that the compiler could not build.
    `announce` gets a line before each, since all together take minutes.

    Without a compiler the error is a single line, and the folder is not created.
    """
    compiler = find_compiler()
    if compiler is None:
        return ["there is no C compiler (cc, gcc)"]
    folder.mkdir(parents=True, exist_ok=True)
    digests, left_out = {}, []
    for level in LEVELS:
        for is_bf16, element in ELEMENTS.items():
            name = prebuilt_name(level, is_bf16)
            announce(f"compiling the C kernels for {level}, {element}")
            try:
                compile_library(compiler, level, is_bf16, FOR_ANY_MACHINE, folder / name)
                digests[name] = library_digest(level, is_bf16, FOR_ANY_MACHINE)
            except Unavailable as error:
                left_out.append(f"{level} for {element}: {error}")
    (folder / DIGESTS_NAME).write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return left_out


def prebuilt_name(level: str, is_bf16: bool) -> str:
    """Return the file name of a prebuilt library."""
    return f"{level.lower()}-{ELEMENTS[is_bf16]}.so"


def prebuilt_library(level: str, is_bf16: bool, folder: Path) -> Path | None:
    """Return the path of the prebuilt library in `folder`; None if it is missing or its digest does not match."""
    path = folder / prebuilt_name(level, is_bf16)
    try:
        digests = json.loads((folder / DIGESTS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_same = digests.get(path.name) == library_digest(level, is_bf16, FOR_ANY_MACHINE)
    return path if is_same and path.is_file() else None


def cached_library(level: str, is_bf16: bool, root: Path, sources: Path = SOURCE_FOLDER) -> Path:
    """Return the path of the library in a cache folder. If it is missing, compile it, and delete old libraries.

    Raises Unavailable if there is no compiler or it fails, OSError if the folder cannot be used.
    """
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("there is no C compiler (cc, gcc): install one, or tokenloom from a wheel with kernels")
    folder = root / library_digest(level, is_bf16, FOR_THIS_MACHINE, compiler, sources)
    library = folder / LIBRARY_NAME
    _make_private(root)
    if not _is_private(library):
        with _locked(root):
            if not _is_private(library):  # else another process compiled it meanwhile
                _compile_into(folder, level, is_bf16, compiler, sources)
                _drop_old(root, time.time())
    return library


def _compile_into(folder: Path, level: str, is_bf16: bool, compiler: str, sources: Path) -> None:
    """Compile a library of a cache folder; `folder` appears when it is finished."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-", ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "library"
        made.mkdir(mode=0o700)
        compile_library(compiler, level, is_bf16, FOR_THIS_MACHINE, made / LIBRARY_NAME, sources)
        (made / LIBRARY_NAME).chmod(0o700)
        try:
            made.rename(folder)
        except OSError:
            if not _is_private(folder / LIBRARY_NAME):  # if it is, a process on another machine compiled it first
                raise


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock of a cache folder, which the end of a process releases. A file system without locks goes without:
    then two processes may compile the same library, and one of the two stays."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_private(root: Path) -> None:
    """Create a cache folder, or take write permission on it from all but its owner: its libraries are executed.
    PermissionError if it belongs to neither this user nor root."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(errno.EPERM, f"it belongs to the user with number {status.st_uid}", str(root))
    if status.st_mode & 0o022:
        root.chmod(status.st_mode & 0o755)


def _is_private(library: Path) -> bool:
    """Return whether the library exists and no other user but root could have written it. It may be a symbolic link:
    the cache folder is private, so only this user or root can have made one."""
    try:
        found = (library.parent.stat(), library.stat())
    except FileNotFoundError:
        return False
    return all(each.st_uid in (0, os.getuid()) and not each.st_mode & 0o022 for each in found)


def user_cache_folder() -> Path | None:
    """Return $XDG_CACHE_HOME/tokenloom, or ~/.cache/tokenloom if that variable is not an absolute path; None if the
    user has no home folder."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "tokenloom"
    except RuntimeError:
        return None


def _drop_old(root: Path, now: float) -> None:
    """Delete all but the newest MAX_LIBRARIES libraries, and old folders that killed compilations left. `now`: unix
    seconds. Files with later times (the clock was set back) count as the oldest."""
    for scratch in root.glob(".build-*"):
        if abs(now - scratch.stat().st_mtime) > 10 * COMPILE_TIMEOUT_S:
            shutil.rmtree(scratch, ignore_errors=True)
    ours = [path for path in root.glob(f"*/{LIBRARY_NAME}") if _DIGEST.fullmatch(path.parent.name)]
    made_at = {path: path.stat().st_mtime for path in ours}
    libraries = sorted(ours, key=lambda path: (made_at[path] <= now, made_at[path]))
    for library in libraries[:-MAX_LIBRARIES]:
        shutil.rmtree(library.parent, ignore_errors=True)
