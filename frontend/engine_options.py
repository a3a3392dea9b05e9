"""Keywords of LLM and AsyncLLM, made into an EngineConfig: each field of EngineConfig is a keyword."""

from __future__ import annotations

import difflib
import os

import msgspec

from ..ipc.config import EngineConfig
from ..ipc.errors import ConfigError

LIBRARY_LOG_LEVEL = "warning"  # a program's own output is not ours to fill


def config_from_keywords(owner: str, model: object, options: dict[str, object]) -> EngineConfig:
    """The configuration that `owner`(model, **options) asks for.

    Raises TypeError for an unknown keyword, with what it may have meant, and ConfigError for a bad value.
    """
    names = [field.name for field in msgspec.structs.fields(EngineConfig)]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, 3)
            hint = f": did you mean {' or '.join(close)}?" if close else ""
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")
    values = {"log_level": LIBRARY_LOG_LEVEL, "model": model, **options}
    try:
        return msgspec.convert({name: _plain(value) for name, value in values.items()}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error.__cause__ or f"{owner}: {error}")) from None


def _plain(value: object) -> object:
    """Paths as text, and torch.bfloat16 as "bfloat16" without importing torch."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value
