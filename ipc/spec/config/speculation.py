"""The values of --speculation, including vLLM's --speculative-config; DraftSpec: the draft model of an engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ...errors import ConfigError
from ..drafts.head_config import HeadConfig
from ..models.model_config import ModelConfig

_FLAG = "--speculation (or --speculative-config, -sc)"
_LOOKUPS = ("lookup", "ngram", "ngram_gpu", "suffix")
_DRAFT_MODEL, EAGLE, MTP = "draft_model", "eagle3", "mtp"
_WITH_MODEL = (_DRAFT_MODEL, EAGLE)
_METHODS = (*_LOOKUPS, *_WITH_MODEL, MTP)
_LOOKUP_MODELS = (None, *_LOOKUPS, "[ngram]")  # names of methods that look tokens up where vLLM has a draft model's
_IGNORED = {  # vLLM's keys for choices that are made by measured cost here, or that the draft model's files make
    *("draft_tensor_parallel_size", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"),
    *("disable_by_batch_size", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "suffix_decoding_max_tree_depth", "max_model_len"),
}
MAX_DRAFTS = 15  # draft tokens of a row in a step


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model: it guesses the next tokens of an engine's model, which has the same tokens."""

    folder: str
    model: ModelConfig  # of a head: its layer
    head: HeadConfig | None = None  # None: it reads tokens alone
    has_integer_products: bool = False  # its quantized weights are multiplied as integers
    weights: str  # digest of its weights, which the names of stored KV blocks contain


class SpeculationOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the drafts that lookup and the draft model make. Within them, measured costs decide how many drafts a
    row gets."""

    method: str = "lookup"
    num_speculative_tokens: int = MAX_DRAFTS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 32  # longest match that counts, in tokens
    model: str | None = None  # the draft model or head: a folder, a GGUF file or a hub id; None: there is none
    revision: str | None = None  # of the draft model

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        if self.method not in _METHODS:
            raise ConfigError(f"{_FLAG}: method {self.method} is not there: use one of {', '.join(_METHODS)}, or off")
        if not self.num_speculative_tokens >= 1:
            raise ConfigError(f"{_FLAG}: num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"{_FLAG}: 1 ≤ prompt_lookup_min ≤ prompt_lookup_max must hold, got {self.prompt_lookup_min} and "
                f"{self.prompt_lookup_max}"
            )
        if self.method in _WITH_MODEL and self.model is None:
            raise ConfigError(f"{_FLAG}: method {self.method} needs a model: give a folder, a GGUF file or a hub id")

    @property
    def has_drafter(self) -> bool:
        """Whether a draft model or head guesses, too."""
        return self.model is not None or self.method == MTP


def speculation_options(
    value: str | dict[str, Any], draft_model: str | None = None, num_drafts: int | None = None
) -> SpeculationOptions | None:
    """Return the options of speculation, None if it is off. draft_model, num_drafts: --draft-model and
    --num-speculative-tokens. ConfigError if a value is invalid, or if two name different models."""
    fields = _fields_of(value)
    if fields is None:
        if draft_model is not None:
            raise ConfigError(f"{_FLAG} is off, and --draft-model {draft_model} is given: leave one of them out")
        return None
    model = fields.pop("model", None)
    method = fields.get("method", _DRAFT_MODEL)
    if isinstance(method, str) and method.endswith(f"_{MTP}"):  # vLLM's names for families, as deepseek_mtp
        method = fields["method"] = MTP
    if method == MTP and model is not None:
        fields["model"] = model
    if method not in _WITH_MODEL:
        method = _DRAFT_MODEL
    elif model not in _LOOKUP_MODELS:
        fields |= {"method": method, "model": model}
    if draft_model is not None:
        if fields.get("model", draft_model) != draft_model:
            raise ConfigError(f"{_FLAG} names the draft model {model}, --draft-model {draft_model}: give one of them")
        fields |= {"method": method, "model": draft_model}
    if num_drafts is not None:
        fields["num_speculative_tokens"] = num_drafts
    try:
        options = msgspec.convert(
            {key: each for key, each in fields.items() if key not in _IGNORED}, SpeculationOptions
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_FLAG}: {error}") from None
    options.check()
    return options


def _fields_of(value: str | dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields that --speculation names, None if it is off."""
    if value == "off":
        return None
    if value in ("auto", "lookup"):
        return {}
    if value == MTP:
        return {"method": MTP}
    fields: object = dict(value) if isinstance(value, dict) else value
    if isinstance(value, str):
        try:
            fields = json.loads(value)
        except (ValueError, RecursionError):
            fields = None
    if not isinstance(fields, dict):
        raise ConfigError(
            f'--speculation must be auto, lookup, mtp, off, or JSON as {{"method": "lookup"}}, got {value}'
        )
    return fields
