"""Conversion of options, given by name, to an EngineConfig.

Each field of EngineConfig is a keyword of LLM and AsyncLLM, a flag of engine-launch and a key of its file, with the
same checks and error texts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from ....ipc.errors import ConfigError
from ....ipc.params.public_struct import suggestion
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.spec.config.engine_config import MAX_NUM_SEQS, EngineConfig
from .environment import check_environment, with_key
from .given import Given as Given
from .nodes import with_nodes
from .synonyms import COMMA_LISTS, NAMES, SWITCHES, VALUES
from .vllm_options import VLLM_OPTIONS

logger = logging.getLogger("tokenloom.options")

LIBRARY_LOG_LEVEL = "warning"  # keeps the output of a program with an LLM free of our INFO lines
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"} | {
    list: "text or a list of texts",
    dict: "a JSON object",
}
_TEXTS = Annotated[list[str], msgspec.Meta(min_length=1)]
_COUNTS = re.compile(r"\w+=\d+(,\w+=\d+)*")  # vLLM's short form of an object: image=4,video=0
_SIZE = re.compile(r"(\d+(?:\.\d+(?=[kmgt]))?)([kmgtKMGT])")  # the capital units take no fraction
_UNITS = {
    unit: base**power for base, units in ((1000, "kmgt"), (1024, "KMGT")) for power, unit in enumerate(units, start=1)
}


class Kind(NamedTuple):
    """Type and accepted values of an option."""

    type: type[bool] | type[int] | type[float] | type[str] | type[list[str]] | type[dict[str, Any]]
    annotation: Any  # the field's type; if it allows None, None selects the default
    choices: tuple[str, ...]  # accepted texts; (): any text
    description: str
    group: str  # a key of GROUPS
    other_values: Mapping[Any, Any]  # by alias: the value
    has_commas: bool  # the value is comma-separated text; a list is accepted, too
    is_secret: bool  # errors do not show the value

    def checked(self, value: object) -> object:
        """Return `value` converted to the option's type; aliases and sizes like 4k are accepted. ValueError "must be …,
        got …" for an invalid value."""
        if isinstance(value, (str, int)) and value in self.other_values:
            return self.other_values[value]
        if self.type is str and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if self.type is int and isinstance(value, str) and (size := _SIZE.fullmatch(value.strip())):
            value = int(float(size[1]) * _UNITS[size[2]])
        if self.type is dict and isinstance(value, str) and _COUNTS.fullmatch(value):
            value = {name: int(count) for name, _, count in (each.partition("=") for each in value.split(","))}
        try:
            if (self.type is list and value is not None) or (self.has_commas and isinstance(value, list)):
                value = msgspec.convert([value] if isinstance(value, str) else value, _TEXTS)
            if self.has_commas and isinstance(value, list):
                value = ",".join(value)
            return msgspec.convert(value, self.annotation)
        except msgspec.ValidationError:
            raise ValueError(f"must be {self._wanted}{self._got(value)}") from None

    def parsed(self, text: str) -> object:
        """Return the value of `text` from the command line. ValueError "must be …, got …" for an invalid value."""
        if self.type in (int, float):
            try:
                return self.checked(self.type(text))
            except ValueError:
                pass
        if (self.type is dict and not _COUNTS.fullmatch(text)) or (self.has_commas and text.startswith("[")):
            try:
                return self.checked(json.loads(text, object_pairs_hook=_object_of))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"must be {self._wanted}{self._got(text)}: {error}") from None
        return self.checked(text)

    def _got(self, value: object) -> str:
        if self.is_secret:
            return ""
        return ", got nothing" if value is None else f", got {value!r:.80}"

    @property
    def _wanted(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.type]


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError if it has a key twice, of which json.loads would keep the last."""
    keys = [key for key, _ in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"must have each key once, {twice} is there twice")
    return dict(pairs)


def _kind_of(name: str, annotation: object) -> Kind:
    whole, meta = typing.get_args(annotation)[:2]
    inner = whole
    if isinstance(whole, types.UnionType):
        inner = next(part for part in typing.get_args(whole) if part is not types.NoneType)
    is_choice = typing.get_origin(inner) is typing.Literal
    choices = typing.get_args(inner) if is_choice else ()
    base = str if is_choice else typing.get_origin(inner) or inner
    others = VALUES.get(name, {})
    group, is_secret = meta.extra["group"], meta.extra["is_secret"]
    return Kind(base, whole, choices, meta.description, group, others, name in COMMA_LISTS, is_secret)


KINDS = {field.name: _kind_of(field.name, field.type) for field in msgspec.structs.fields(EngineConfig)}


def config_from_keywords(owner: str, model: object, options: Mapping[str, object]) -> EngineConfig:
    """Return the configuration for `owner`(model, **options); None selects the default (log_level: warning).

    Logs ignored options. TypeError for an unknown keyword, with similar names; ConfigError for a bad value."""
    for name in options:
        if name not in OPTION_NAMES:
            hint = suggestion(name, OPTION_NAMES)
            if name in SamplingParams.__struct_fields__:
                hint = f": it is a parameter of a request, write SamplingParams({name}=…) there"
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}{hint}")
    values = {"model": model, **options}
    given = with_key(_keywords(owner, {"log_level": LIBRARY_LOG_LEVEL}) | _keywords(owner, values), os.environ)
    config = new_config(given)
    check_environment(config, os.environ)
    log_ignored(given)
    return config


@contextlib.contextmanager
def keyword_errors(owner: str, model: object, options: Mapping[str, object]) -> Iterator[None]:
    """Turn a ConfigError of an engine's start into one that names the keywords of `owner`(model, **options)."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(as_given(str(error), _keywords(owner, {"model": model, **options}))) from None


def _keywords(owner: str, values: Mapping[str, object]) -> dict[str, Given]:
    return {name: Given(_plain(value), name, f"{owner}(): ") for name, value in values.items() if value is not None}


_VLLM_NAMES = [name for name in VLLM_OPTIONS if len(name) > 3]  # short names are only flags
OPTION_NAMES = (*KINDS, *NAMES, *SWITCHES, *_VLLM_NAMES)


def new_config(options: Mapping[str, Given]) -> EngineConfig:
    """Return the EngineConfig for options by name or alias; ignored options are skipped. ConfigError names option and
    place.

    If max_num_batched_tokens is given and max_num_seqs is not, max_num_seqs is limited to it."""
    known: dict[str, Given] = {}
    for name, given in with_nodes(options).items():
        if (option := VLLM_OPTIONS.get(name)) is not None:
            if option.is_refused(given.value):
                raise ConfigError(f"{given.where}{given.written} {option.refusal(given.value)}")
            continue
        if name in SWITCHES:
            name, given = _switched(name, given)
        if (field := NAMES.get(name, name)) in known:
            raise ConfigError(f"{given.where}{known[field].written} and {given.written} are the same option: give one")
        known[field] = given
    values: dict[str, Any] = {name: _checked(name, given) for name, given in known.items()}
    if (budget := values.get("max_num_batched_tokens")) and "max_num_seqs" not in values:
        values["max_num_seqs"] = max(1, min(budget, MAX_NUM_SEQS))  # each row needs at least one token of the budget
    try:
        return EngineConfig(**values)
    except ConfigError as error:
        raise ConfigError(as_given(str(error), known)) from None


def _switched(name: str, given: Given) -> tuple[str, Given]:
    """Return the option that has the place of an old boolean one, and its value."""
    option, values = SWITCHES[name]
    if not isinstance(given.value, bool):
        raise ConfigError(f"{given.where}{given.written} must be true or false, got {given.value!r:.80}")
    return option, Given(values[given.value], given.written, given.where)


def log_ignored(options: Mapping[str, Given]) -> None:
    """Log a warning, in one line, about the options that have no effect, if there are any."""
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


def as_given(message: str, options: Mapping[str, Given]) -> str:
    """Return an error's message with each flag in the user's spelling, and with the place of the first flag before it.
    `options`: by name or alias."""
    known = {NAMES.get(name, name): given for name, given in options.items()}
    flags = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z0-9-]+[a-z0-9]", message))
    found = [(flag, known[name]) for flag in flags if (name := flag[2:].replace("-", "_")) in known]
    for flag, given in found:
        message = re.sub(rf"(?<![\w-]){flag}\b(?!-)", given.written.replace("\\", r"\\"), message)
    where = found[0][1].where if found else ""
    return message if message.startswith(where) else f"{where}{message}"


def _utf8(value: object) -> object:
    """Return a text, or a list of texts, with bytes that are held as surrogates decoded as UTF-8; ValueError if they
    are not UTF-8. Other values are returned unchanged."""
    if isinstance(value, list):
        return [_utf8(each) for each in value]
    if not isinstance(value, str):
        return value
    try:
        return value.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise ValueError(f"{value!r} is not UTF-8: rename the file, or make a link to it") from None


def _plain(value: object) -> object:
    """Return a path as text, torch.bfloat16 as "bfloat16" (without importing torch), and other values unchanged."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value
