"""The values of --speculation, including vLLM's --speculative-config for methods that look tokens up."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ...errors import ConfigError

_FLAG = "--speculation (or --speculative-config, -sc)"
_METHODS = ("lookup", "ngram", "ngram_gpu", "suffix")
_MODELS = (None, *_METHODS, "[ngram]")  # names of these methods where vLLM has a draft model's
_IGNORED = {  # vLLM's keys for choices that are made by measured cost here
    *("draft_tensor_parallel_size", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"),
    *("disable_by_batch_size", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "suffix_decoding_max_tree_depth"),
}
MAX_DRAFTS = 15  # draft tokens of a row in a step


class SpeculationOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the drafts that lookup proposes. Within them, measured costs decide how many drafts a row gets."""

    method: str = "lookup"
    num_speculative_tokens: int = MAX_DRAFTS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 32  # longest match that counts, in tokens

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


def speculation_options(value: str | dict[str, Any]) -> SpeculationOptions | None:
    """Return the options of speculation, None if it is off. ConfigError if `value` is invalid."""
    if value in ("off", "auto", "lookup"):
        return None if value == "off" else SpeculationOptions()
    fields: object = dict(value) if isinstance(value, dict) else value
    if isinstance(value, str):
        try:
            fields = json.loads(value)
        except (ValueError, RecursionError):
            fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f'--speculation must be auto, lookup, off, or JSON as {{"method": "lookup"}}, got {value}')
    model = fields.pop("model", None)
    if model not in _MODELS and "method" not in fields:
        raise ConfigError(f"{_FLAG}: there are no draft models such as {model}: give a method of {', '.join(_METHODS)}")
    try:
        options = msgspec.convert(
            {key: each for key, each in fields.items() if key not in _IGNORED}, SpeculationOptions
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_FLAG}: {error}") from None
    options.check()
    return options
