"""ConfigFile: the fields of a checkpoint's config.json, read with checks. ConfigError names file, field and value."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never, TypeGuard

from ...errors import ConfigError

MAX_LAYERS = 4096  # limits the list of layers, which is made before other fields are checked
MAX_SIZE = (1 << 31) - 1  # largest value of a field that counts something
LAYER_COUNTS = frozenset(
    """num_hidden_layers num_layers n_layer n_layers num_blocks depth encoder_layers num_nextn_predict_layers
    num_kv_shared_layers""".split()  # noqa: SIM905
)
MAX_NUMBER = 1e38  # fits into float32
LEAVE_OUT = ": leave out --model-impl native"  # the mend of NotNative
MAX_JSON_BYTES = 64 << 20


class NotNative(ConfigError):
    """Error: the native layers of an architecture lack something that config.json asks for."""


class ConfigFile:
    """Fields of a config.json with a family's defaults for those that it leaves out. A field that is None counts as
    left out."""

    def __init__(
        self, path: Path, fields: Mapping[str, Any], place: str = "", spelling: Mapping[str, str] | None = None
    ) -> None:
        """`place`: path of the object that holds the fields, with a dot at the end; "": the whole file. `spelling`: our
        name → path in the file, for fields of other objects or with other names."""
        self.path = path
        self._fields, self._place, self._spelling = dict(fields), place, dict(spelling or {})

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def fields(self) -> dict[str, Any]:
        """Return the values of all fields, unchecked."""
        return dict(self._fields)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFile:
        """Return a copy in which fields that the file does not name at all have these values."""
        return ConfigFile(self.path, {**defaults, **self._fields}, self._place, self._spelling)

    def with_fields(self, fields: Mapping[str, Any]) -> ConfigFile:
        """Return a copy in which `fields` replace the values of fields, or are added."""
        return ConfigFile(self.path, {**self._fields, **fields}, self._place, self._spelling)

    def with_names(self, names: Mapping[str, str]) -> ConfigFile:
        """Return a copy in which each field of `names` has both of its names; see `named`."""
        is_ours = {ours: ours in self._fields and theirs not in self._fields for ours, theirs in names.items()}
        spelling = dict((theirs, ours) if is_ours[ours] else (ours, theirs) for ours, theirs in names.items())
        places = {name: self.spelled(stated) for name, stated in spelling.items()}
        return ConfigFile(self.path, named(self._fields, names), self._place, {**self._spelling, **places})

    def nested(self, name: str) -> ConfigFile:
        """Return the fields of the object `name`. Fields that it lacks come from the outer fields, and so does
        tie_word_embeddings, which transformers reads from the whole model."""
        outer = {"tie_word_embeddings": self.get("tie_word_embeddings")}
        inner = self.part(name).fields()
        spelling = {each: self.spelled(each) for each in self._fields if each not in inner}
        return ConfigFile(self.path, {**self._fields, **inner, **outer}, f"{self.spelled(name)}.", spelling)

    def part(self, name: str, default: Mapping[str, Any] | None = None) -> ConfigFile:
        """Return only the fields of the object `name`; those of `default`, or none, if the file leaves it out."""
        inner = self.get(name, default or {})
        if not isinstance(inner, dict):
            self.refuse(f"{self.spelled(name)} must be an object, it is {shown(inner)}")
        return ConfigFile(self.path, inner, f"{self.spelled(name)}.")

    def spelled(self, name: str) -> str:
        """Return the path of a field in the file, for messages."""
        return self._spelling.get(name, self._place + name)

    def positive(self, name: str, default: int | None = None) -> int:
        return self.whole(name, default, least=1)

    def whole(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an integer of at least `least`. ConfigError if the field has another value, or no value and no
        default."""
        value, most = self.get(name, default), MAX_LAYERS if name in LAYER_COUNTS else MAX_SIZE
        if not is_whole(value) or not least <= value <= most:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            limit = f" of at most {most}" if is_whole(value) and value > most else ""
            self.refuse(f"{self.spelled(name)} must be {kind}{limit}, it is {shown(value)}")
        return value

    def wholes(self, name: str, default: Sequence[int] = (), least: int = 0) -> list[int]:
        """Return a list of integers of at least `least`; ConfigError for any other value."""
        value = self.get(name, default)
        if not isinstance(value, list | tuple) or not all(
            is_whole(each) and least <= each <= MAX_SIZE for each in value
        ):
            self.refuse(f"{self.spelled(name)} must be a list of integers from {least}, it is {shown(value)}")
        return list(value)

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers above 0; ConfigError for any other value."""
        value = self.get(name)
        if not isinstance(value, list) or not all(is_number(each) and each > 0 for each in value):
            self.refuse(f"{self.spelled(name)} must be a list of numbers above 0, it is {shown(value)}")
        return list(map(float, value))

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.get(name, default)
        if not is_number(value):
            self.refuse(f"{self.spelled(name)} must be a number, it is {shown(value)}")
        return float(value)

    def above_zero(self, name: str, default: float = 0.0) -> float:
        """Return a number above 0, such as a divisor or the argument of a logarithm; ConfigError for any other
        value."""
        value = self.number(name, default)
        if value <= 0:
            self.refuse(f"{self.spelled(name)} must be a number above 0, it is {shown(value)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            self.refuse(f"{self.spelled(name)} must be true or false, it is {shown(value)}")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            self.refuse(f"{self.spelled(name)} must be a text, it is {shown(value)}")
        return value

    def choice(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return the value of `known` for the field's value; ConfigError if that is not a key of `known`."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(f"{self.spelled(name)} {value!s:.100} is not supported, known are {', '.join(known)}")
        return known[value]

    def refuse(self, reason: str) -> Never:
        raise ConfigError(f"{self.path}: {reason}")

    def refuse_native(self, reason: str) -> Never:
        """Raise NotNative: native layers cannot run this file. With --model-impl auto transformers' layers run it."""
        raise NotNative(f"{self.path}: {reason}{LEAVE_OUT}")


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def shown(value: object) -> str:
    """Return the start of a value from a file, for a message."""
    return reprlib.repr(value) if isinstance(value, list | dict) else f"{value!r:.100}"


def named(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields, with each field of `names` under both of its names. `names`: our name → the name in most
    files."""
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
    """Return `raw` with `overrides` applied; text_config, vision_config and audio_config are overridden field by field.
    Rotary embeddings have two spellings, rope_scaling and rope_parameters: an override of one replaces both."""
    file = ConfigFile(Path("config.json"), raw)
    nested = [
        name for name in ("text_config", "vision_config", "audio_config") if isinstance(overrides.get(name), dict)
    ]
    inner = {name: overridden(file.part(name).fields(), overrides[name]) for name in nested}
    parameters = file.part("rope_scaling").fields() | file.part("rope_parameters").fields()
    if "rope_theta" in overrides and parameters:
        raw = {**raw, "rope_parameters": {**parameters, "rope_theta": overrides["rope_theta"]}, "rope_scaling": None}
    elif {"rope_scaling", "rope_parameters"} & overrides.keys():
        theta = parameters.get("rope_theta") or raw.get("rope_theta")
        raw = {**raw, "rope_scaling": None, "rope_parameters": None, "rope_theta": theta}
    return raw | overrides | inner
