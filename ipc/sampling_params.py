"""What a request may ask for: SamplingParams, validated where it is made and again where it arrives.

Knows the ranges that hold for every model; what depends on the model (vocabulary, length) is the input processor's.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from .errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    The token at a position is argmax(logit / T − log E) over the tokens that the filters leave, where E is
    exponential noise from a counter-based generator keyed by `seed`, token id and position: the same seed draws the
    same tokens in any batch, after any restart. Filters apply in the order temperature → top_k → top_p → min_p.
    Names and meanings are vLLM's.
    """

    temperature: float = 1.0  # ≥ 0; 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    top_p: float = 1.0  # (0, 1]: keep the likeliest tokens whose probabilities first reach top_p
    min_p: float = 0.0  # [0, 1]: keep tokens at least min_p as likely as the likeliest
    seed: int | None = None  # [-2^63, 2^64); None draws one at random
    max_tokens: int | None = 16  # ≥ 1; None: up to max_model_len
    min_tokens: int = 0  # no stop by token before this many tokens
    stop: str | list[str] | None = None  # text that ends the answer; not part of it
    stop_token_ids: list[int] | None = None  # tokens that end the answer; the token is part of token_ids, not of text
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # go on after the model's end token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    priority: int = 0  # lower runs first, with --scheduling-policy priority
    timeout_s: float | None = None  # > 0: end with finish_reason timeout this long after arrival
    queue_timeout_s: float | None = None  # > 0: the same for a request that has not begun to run
    cache_salt: str | None = None  # prefixes are shared only among requests of the same salt

    def __post_init__(self) -> None:
        for name, (low, high, low_open) in _FLOAT_RANGES.items():
            _check_float(name, getattr(self, name), low, high, low_open)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: lower it")
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        for name in ("timeout_s", "queue_timeout_s"):
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), 0.0, 1e9, low_open=True)
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and 0 < len(self.cache_salt) <= 1024):
            raise RequestError("cache_salt must be a string of 1 to 1024 characters")
        self._check_stops()

    def _check_stops(self) -> None:
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise RequestError(f"stop holds {string!r}: each stop string must be a string of at least 1 character")
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids has {len(self.stop_token_ids or ())} ids, at most {MAX_STOP_TOKEN_IDS}")
        for token_id in self.stop_token_ids or ():
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A validated copy with `changes`."""
        return msgspec.structs.replace(self, **changes)


_FLOAT_RANGES: dict[str, tuple[float, float, bool]] = {  # name: (low, high, low is excluded)
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
}


def _check_float(name: str, value: object, low: float, high: float, low_open: bool) -> None:
    bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number in {bounds}, got {value!r}")
    if math.isnan(value) or value < low or value > high or (low_open and value == low):
        raise RequestError(f"{name} must be in {bounds}, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}")
