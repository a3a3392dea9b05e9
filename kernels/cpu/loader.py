"""Loading of the best C kernels that this machine can run, prebuilt or compiled now.

For each level, best first: try the prebuilt library, then one compiled into the user's cache folder, a spare folder or
a temporary folder, the first that is writable and allows execution.
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
from .processor import levels_up_to

logger = logging.getLogger("tokenloom.kernels")


@dataclass(frozen=True, eq=False)
class LoadedKernels:
    """A loaded library and its origin."""

    library: KernelLibrary
    level: str
    is_prebuilt: bool

    def __str__(self) -> str:
        return f"C kernels, {self.level}, {'prebuilt' if self.is_prebuilt else 'compiled here'}"


@functools.cache
def load_kernels(is_bf16: bool, spare_folder: Path | None = None, isa: str = "auto") -> LoadedKernels:
    """Load the best library that can be loaded, of level `isa` at most; repeated calls return the same. Raises
    Unavailable with the best level's reason if none can be loaded, ValueError if the processor lacks `isa`."""
    first_error: Unavailable | None = None
    for level in levels_up_to(isa):
        try:
            return load_level(level, is_bf16, spare_folder)
        except Unavailable as error:
            first_error = first_error or error
    raise first_error or Unavailable("the processor has no AVX2")


def load_level(
    level: str, is_bf16: bool, spare_folder: Path | None = None, prebuilt_folder: Path = PREBUILT_FOLDER
) -> LoadedKernels:
    """Load the library of one of `instruction_levels()`: the prebuilt one, or else one compiled here. Raises
    Unavailable if both fail."""
    prebuilt = prebuilt_library(level, is_bf16, prebuilt_folder)
    if prebuilt is not None:
        try:
            return LoadedKernels(load_library(prebuilt), level, is_prebuilt=True)
        except OSError as error:  # built for another C library
            logger.info("the prebuilt kernels do not load: %s", error)
    folders = (folder for folder in (user_cache_folder(), spare_folder) if folder is not None)
    return LoadedKernels(_load_compiled(level, is_bf16, folders), level, is_prebuilt=False)


def _load_compiled(level: str, is_bf16: bool, folders: Iterable[Path]) -> KernelLibrary:
    """Load the library from the first of `folders` that is writable and allows execution, or else from a temporary
    folder; compile it if it is missing there. Raises Unavailable if the compiler fails or no folder can be used."""
    errors: list[OSError] = []
    for folder in folders:
        try:
            return load_library(cached_library(level, is_bf16, folder))
        except OSError as error:
            logger.info("the C kernels cannot be kept in %s: %s", folder, error)
            errors.append(error)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenloom-kernels-") as temporary:
            return load_library(cached_library(level, is_bf16, Path(temporary)))  # stays loaded after the file is gone
    except OSError as error:
        errors.append(error)
    raise Unavailable(
        f"no folder for compiled kernels ({'; '.join(map(str, errors))}): set XDG_CACHE_HOME to one that is writable "
        "and allows execution"
    )
