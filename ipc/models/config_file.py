"""ConfigFile: the fields of a checkpoint's config.json, read with checks. ConfigError names file, field and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

from ..errors import ConfigError

MAX_LAYERS = 4096  # a list of them is made before anything else is checked
MAX_SIZE = (1 << 31) - 1  # of a field that counts something
LAYER_COUNTS = frozenset("num_hidden_layers num_layers n_layer n_layers num_blocks depth encoder_layers".split())  # noqa: SIM905
MAX_NUMBER = 1e38  # of float32
MAX_JSON_BYTES = 64 << 20


class NotNative(ConfigError):
    """The native model of an architecture lacks what config.json asks for."""


class ConfigFile:
    """Fields of a config.json with a family's defaults for those that it leaves out. A field that is None counts as
    left out."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = dict(fields)

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFile:
        """Return a copy in which fields that the file does not name at all have these values."""
        return ConfigFile(self.path, {**defaults, **self._fields})

    def with_names(self, names: Mapping[str, str]) -> ConfigFile:
        """Return a copy with fields under another name, too; see `named`."""
        return ConfigFile(self.path, named(self._fields, names))

    def nested(self, name: str) -> ConfigFile:
        """Return the fields of the object `name`, with the outer fields for those that it does not name, and for
        tie_word_embeddings, which transformers reads of the whole model."""
        inner = self.get(name)
        if not isinstance(inner, dict):
            self.refuse(f"{name} must be an object, it is {inner!r}")
        outer = {"tie_word_embeddings": self.get("tie_word_embeddings")}
        return ConfigFile(self.path, {**self._fields, **inner, **outer})

    def positive(self, name: str) -> int:
        value, most = self._fields.get(name), MAX_LAYERS if name in LAYER_COUNTS else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            limit = f" of at most {most}" if isinstance(value, int) and value > most else ""
            self.refuse(f"{name} must be a positive integer{limit}, it is {value!r:.100}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
            self.refuse(f"{name} must be a number, it is {value!r:.100}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, default))

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return the value of `known` for a field that must be one of its keys."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(f"{name} {value} is not supported, known are {', '.join(known)}")
        return known[value]

    def refuse(self, reason: str) -> Never:
        raise ConfigError(f"{self.path}: {reason}")

    def refuse_native(self, reason: str) -> Never:
        """Refuse to run native layers. --model-impl auto takes transformers' instead."""
        raise NotNative(f"{self.path}: {reason}: leave out --model-impl native")


def named(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields, those of `names` under both of their names. `names`: our name, and that of most files."""
    theirs = {theirs: fields[ours] for ours, theirs in names.items() if ours in fields}
    fields = {**theirs, **fields}
    return {**fields, **{ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint; ConfigError if it is missing or invalid."""
    try:
        if (num_bytes := path.stat().st_size) > MAX_JSON_BYTES:
            raise ConfigError(f"{path} has {num_bytes} bytes, at most {MAX_JSON_BYTES} are read: it is no such file")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: --model must name a folder with a checkpoint") from None
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, it holds {type(value).__name__}")
    return value


def overridden(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` with overrides applied, to fields of its objects one by one. Rotary embeddings have two spellings,
    rope_scaling and rope_parameters: an override of one replaces both."""
    nested = [
        name for name in ("text_config", "vision_config", "audio_config") if isinstance(overrides.get(name), dict)
    ]
    inner = {name: overridden(raw.get(name) or {}, overrides[name]) for name in nested}
    parameters = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    if "rope_theta" in overrides and parameters:
        raw = {**raw, "rope_parameters": {**parameters, "rope_theta": overrides["rope_theta"]}, "rope_scaling": None}
    elif {"rope_scaling", "rope_parameters"} & overrides.keys():
        theta = parameters.get("rope_theta") or raw.get("rope_theta")
        raw = {**raw, "rope_scaling": None, "rope_parameters": None, "rope_theta": theta}
    return raw | overrides | inner
