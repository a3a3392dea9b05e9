"""Makes an EngineConfig from options by name. Each field of EngineConfig is a keyword of LLM and AsyncLLM, a flag of
engine-launch and a key of its file, with the same checks and error texts.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ...ipc.config.engine_config import MAX_NUM_SEQS, EngineConfig
from ...ipc.errors import ConfigError
from .synonyms import COMMA_LISTS, NAMES, VALUES
from .vllm_options import VLLM_OPTIONS

logger = logging.getLogger("tokenloom.options")

CLOSE = 0.7  # least difflib ratio of a suggested name
LIBRARY_LOG_LEVEL = "warning"  # keeps the output of a program with an LLM free of our INFO lines
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"} | {
    list: "text or a list of texts",
    dict: "a JSON object",
}
_SIZE = re.compile(r"(\d+)([KMGT])|(\d+(?:\.\d+)?)([kmgt])")


class Kind(NamedTuple):
    """Type and accepted values of an option."""

    type: type[bool] | type[int] | type[float] | type[str] | type[list[str]] | type[dict[str, Any]]
    choices: tuple[str, ...]  # accepted texts; (): any
    is_optional: bool  # None selects the default
    description: str
    group: str  # of GROUPS
    other_values: Mapping[Any, Any]  # alias: value
    has_commas: bool  # comma-separated text, also accepted as a list

    def checked(self, value: object) -> object:
        """Convert `value` to the option's type; ValueError: "must be …, got …"."""
        if value is None and self.is_optional:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, (str, int)) and value in self.other_values:
            return self.other_values[value]
        if self.type is str and is_number:
            value = str(value)
        if self.type is float and is_number:
            value = float(typing.cast(float, value))
        if self.type is int and isinstance(value, str) and (size := _SIZE.fullmatch(value.strip())):
            value = _size(size)
        if self.type is list or (self.has_commas and isinstance(value, list)):
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, (list, tuple)) or not value or not all(isinstance(each, str) for each in value):
                raise ValueError(f"must be {self._wanted}, got {value!r:.80}")
            value = list(value) if self.type is list else ",".join(value)
        is_of_type = isinstance(value, self.type) and (self.type is bool or not isinstance(value, bool))
        if not is_of_type or (self.choices and value not in self.choices):
            raise ValueError(f"must be {self._wanted}, got {'nothing' if value is None else f'{value!r:.80}'}")
        return value

    def parsed(self, text: str) -> object:
        """Parse `text` of the command line; ValueError as `checked`."""
        if self.type in (int, float):
            try:
                return self.checked(self.type(text))
            except ValueError:
                pass
        if self.type is dict or (self.has_commas and text.startswith("[")):
            try:
                return self.checked(json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(f"must be {self._wanted}, got {text!r:.80}: {error}") from None
        return self.checked(text)

    @property
    def _wanted(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.type]


def _size(match: re.Match[str]) -> int:
    """Convert a number with a suffix: K, M, G, T are powers of 1024, k, m, g, t powers of 1000."""
    binary, binary_unit, decimal, decimal_unit = match.groups()
    if binary:
        return int(binary) * int(1024 ** ("KMGT".index(binary_unit) + 1))
    return int(float(decimal) * 1000 ** ("kmgt".index(decimal_unit) + 1))


def _kind_of(name: str, annotation: object) -> Kind:
    inner, meta = typing.get_args(annotation)[:2]
    is_optional = isinstance(inner, types.UnionType)
    if is_optional:
        inner = next(part for part in typing.get_args(inner) if part is not types.NoneType)
    is_choice = typing.get_origin(inner) is typing.Literal
    choices = typing.get_args(inner) if is_choice else ()
    base = str if is_choice else typing.get_origin(inner) or inner
    others = VALUES.get(name, {})
    return Kind(base, choices, is_optional, meta.description, meta.extra["group"], others, name in COMMA_LISTS)


KINDS = {field.name: _kind_of(field.name, field.type) for field in msgspec.structs.fields(EngineConfig)}


class Given(NamedTuple):
    """A value that the user gave for an option, with the option's spelling and place for errors."""

    value: object
    written: str  # the user's spelling: --max-num-seqs, max-num-seqs, max_num_seqs
    where: str = ""  # "engine.yaml line 3: "


def config_from_keywords(owner: str, model: object, options: Mapping[str, object]) -> EngineConfig:
    """Make the configuration of `owner`(model, **options); None selects an option's default.

    Raises TypeError for an unknown keyword, with similar names, and ConfigError for a bad value.
    """
    for name in options:
        if name not in OPTION_NAMES:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{suggestion(name, OPTION_NAMES)}")
    values = {"log_level": LIBRARY_LOG_LEVEL, "model": model, **options}
    given = {name: Given(_plain(value), name, f"{owner}(): ") for name, value in values.items() if value is not None}
    config = new_config(given)
    log_ignored(given)
    return config


OPTION_NAMES = (*KINDS, *NAMES, *(name for name in VLLM_OPTIONS if len(name) > 3))  # short names are only flags


def new_config(options: Mapping[str, Given]) -> EngineConfig:
    """Make an EngineConfig from the given options by name; ConfigError names the option and its place."""
    _check_vllm_options(options)
    known: dict[str, Given] = {}
    for name, given in options.items():
        if name in VLLM_OPTIONS:
            continue
        if (field := NAMES.get(name, name)) in known:
            raise ConfigError(f"{given.where}{known[field].written} and {given.written} are the same option: give one")
        known[field] = given
    values: dict[str, Any] = {name: _checked(name, given) for name, given in known.items()}
    if (budget := values.get("max_num_batched_tokens")) and "max_num_seqs" not in values:
        values["max_num_seqs"] = max(1, min(budget, MAX_NUM_SEQS))  # each row needs a token of the budget
    try:
        return EngineConfig(**values)
    except ConfigError as error:
        raise ConfigError(_as_given(str(error), known)) from None


def _check_vllm_options(options: Mapping[str, Given]) -> None:
    """Raise ConfigError for a vLLM option that requests a feature this engine lacks."""
    for name, given in options.items():
        if name in VLLM_OPTIONS and VLLM_OPTIONS[name].is_refused(given.value):
            raise ConfigError(f"{given.where}{given.written} {VLLM_OPTIONS[name].refusal(given.value)}")


def log_ignored(options: Mapping[str, Given]) -> None:
    """Log one line with all options that have no effect."""
    ignored = [
        f"{given.written} ({VLLM_OPTIONS[name].why})"
        for name, given in options.items()
        if name in VLLM_OPTIONS and VLLM_OPTIONS[name].harmless is None
    ]
    if ignored:
        logger.warning("accepted without effect: %s", ", ".join(ignored))


def _checked(name: str, given: Given) -> object:
    try:
        return KINDS[name].checked(_utf8(given.value))
    except ValueError as error:
        raise ConfigError(f"{given.where}{given.written} {error}") from None


def _as_given(message: str, options: Mapping[str, Given]) -> str:
    """Replace each flag in the message by the user's spelling, and put the place of the first one before it."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in re.findall(r"--[a-z-]+[a-z]", message)]
    found = [options[name] for name in names if name in options]
    for name in names:
        if name in options:
            message = re.sub(rf"--{name.replace('_', '-')}\b(?!-)", options[name].written, message)
    return f"{found[0].where}{message}" if found else message


def suggestion(name: str, names: Iterable[str]) -> str:
    """Format those of `names` that are similar to `name` as the end of an error; empty if none is."""
    close = difflib.get_close_matches(name, list(names), 3, CLOSE)
    return f": did you mean {' or '.join(close)}?" if close else ""


def _utf8(value: object) -> object:
    """Decode a text as UTF-8 if the locale's encoding could not (surrogateescape); ValueError if it is not UTF-8."""
    if not isinstance(value, str):
        return value
    try:
        return value.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise ValueError(f"{value!r} is not UTF-8: rename the file, or make a link to it") from None


def _plain(value: object) -> object:
    """Convert paths to text, and torch.bfloat16 to "bfloat16" without importing torch."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value
