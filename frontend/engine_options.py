"""Options by name, made into an EngineConfig: each field of EngineConfig is a keyword of LLM and AsyncLLM."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import msgspec

from ..ipc.config import EngineConfig
from ..ipc.errors import ConfigError

LIBRARY_LOG_LEVEL = "warning"  # a program's own output is not ours to fill
NAMES = [field.name for field in msgspec.structs.fields(EngineConfig)]


def config_from_keywords(owner: str, model: object, options: Mapping[str, object]) -> EngineConfig:
    """The configuration that `owner`(model, **options) asks for.

    Raises TypeError for an unknown keyword, with what it may have meant, and ConfigError for a bad value.
    """
    for name in options:
        if name not in NAMES:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{_meant(name)}")
    values = {"log_level": LIBRARY_LOG_LEVEL, "model": model, **options}
    return config_from_options({name: _plain(value) for name, value in values.items()}, owner)


def config_from_options(options: Mapping[str, object], source: str) -> EngineConfig:
    """EngineConfig from plain values, checked by type; `source` says in an error where they came from."""
    for name in options:
        if name not in NAMES:
            raise ConfigError(f"{source}: unknown option {name}{_meant(name)}")
    options = {name: _utf8(name, value) for name, value in options.items()}
    try:
        return msgspec.convert(options, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error.__cause__ or f"{source}: {error}")) from None


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, NAMES, 3)
    return f": did you mean {' or '.join(close)}?" if close else ""


def _utf8(name: str, value: object) -> object:
    """A text whose bytes are UTF-8, though the locale of this program took them for another encoding's."""
    if not isinstance(value, str):
        return value
    try:
        return value.encode(errors="surrogateescape").decode()
    except UnicodeError:
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} {value!r} is not UTF-8: rename the file, or make a link to it") from None


def _plain(value: object) -> object:
    """Paths as text, and torch.bfloat16 as "bfloat16" without importing torch."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value
