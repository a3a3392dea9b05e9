"""The loader: the best library of the C kernels that this machine can run, prebuilt or compiled now.

Tries each level from the best on: first the library that came with the package, then one compiled into the user's cache
folder, a spare folder or a temporary one, whichever can be written and run from. Owns nothing but what it has loaded.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .compiler import Unavailable
from .library import KernelLibrary, load_library
from .library_store import PREBUILT_FOLDER, cached_library, prebuilt_library, user_cache_folder
from .processor import instruction_levels

logger = logging.getLogger("tokenloom.kernels")


@dataclass(frozen=True, eq=False)
class LoadedKernels:
    """A library that is loaded, and where it came from."""

    library: KernelLibrary
    level: str
    is_prebuilt: bool

    def __str__(self) -> str:
        return f"C kernels, {self.level}, {'prebuilt' if self.is_prebuilt else 'compiled here'}"


@functools.cache
def load_kernels(is_bf16: bool, spare_folder: Path | None = None) -> LoadedKernels:
    """The library of the best level, once for a process. Raises Unavailable with the reason at the best level."""
    first_error: Unavailable | None = None
    for level in instruction_levels():
        try:
            return load_level(level, is_bf16, spare_folder)
        except Unavailable as error:
            first_error = first_error or error
    raise first_error or Unavailable("the processor has no AVX2")


def load_level(
    level: str, is_bf16: bool, spare_folder: Path | None = None, prebuilt_folder: Path = PREBUILT_FOLDER
) -> LoadedKernels:
    """The library of one of `instruction_levels()`. Raises Unavailable."""
    prebuilt = prebuilt_library(level, is_bf16, prebuilt_folder)
    if prebuilt is not None:
        try:
            return LoadedKernels(load_library(prebuilt), level, is_prebuilt=True)
        except OSError as error:  # made for another C library
            logger.info("the prebuilt kernels do not load: %s", error)
    folders = (folder for folder in (user_cache_folder(), spare_folder) if folder is not None)
    return LoadedKernels(_load_compiled(level, is_bf16, folders), level, is_prebuilt=False)


def _load_compiled(level: str, is_bf16: bool, folders: Iterable[Path]) -> KernelLibrary:
    """From the first folder that can be written and run from; a temporary one is the last."""
    errors: list[OSError] = []
    for folder in folders:
        try:
            return load_library(cached_library(level, is_bf16, folder))
        except OSError as error:
            logger.info("the C kernels cannot be kept in %s: %s", folder, error)
            errors.append(error)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenloom-kernels-") as temporary:
            return load_library(cached_library(level, is_bf16, Path(temporary)))  # it stays loaded without its file
    except OSError as error:
        errors.append(error)
    raise Unavailable(
        f"no folder can hold them compiled ({'; '.join(map(str, errors))}): set XDG_CACHE_HOME to one that can be "
        "written and run from"
    )
