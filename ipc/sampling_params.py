"""What a request may ask for: SamplingParams, validated where it is made and again where it arrives.

Knows the ranges that hold for every model; what depends on the model (vocabulary, length) is the input processor's.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import msgspec

from .errors import RequestError
from .structured_outputs import StructuredOutputsParams

MAX_CHILDREN = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGITS_PROCESSORS = 8

OutputKind: TypeAlias = Literal["cumulative", "delta", "final_only"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    The token at a position is argmax(logit / T − log E) over the tokens that the filters leave, where E is
    exponential noise from a counter-based generator keyed by `seed`, token id and position: the same seed draws the
    same tokens in any batch, after any restart. Names and meanings are vLLM's, and so is the order of operations:

        1. logprobs are taken from the logits as the model gives them, before anything below;
           structured_outputs: tokens that cannot continue a conforming text become −∞
        2. allowed_token_ids: all others become −∞
        3. bad_words: the token that would complete one becomes −∞
        4. min_tokens: until then the tokens that would end the answer become −∞
        5. logit_bias is added
        6. logits_processors, in their order
        7. repetition_penalty (tokens of prompt and output: a positive logit is divided by it, a negative one
           multiplied), then frequency_penalty × count and presence_penalty (tokens of the output) are subtracted
        8. temperature 0 takes the largest logit; else logits are divided by the temperature
        9. min_p, then top_k, then top_p leave out tokens; each looks at what the one before left
        10. the draw
    """

    n: int = 1  # answers to make, 1 to MAX_CHILDREN; answer i draws with seed + i
    best_of: int | None = None  # only as another word for n: nothing is generated that is not returned
    temperature: float = 1.0  # ≥ 0; 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    top_p: float = 1.0  # (0, 1]: keep the likeliest tokens whose probabilities first reach top_p
    min_p: float = 0.0  # [0, 1]: keep tokens at least min_p as likely as the likeliest
    presence_penalty: float = 0.0  # [-2, 2]: subtracted from the logit of each token that the output has
    frequency_penalty: float = 0.0  # [-2, 2]: the same, times how often the output has it
    repetition_penalty: float = 1.0  # (0, 100]: above 1 discourages tokens of prompt and output
    logit_bias: dict[int, float] | None = None  # token id: [-100, 100], added to its logit
    allowed_token_ids: list[int] | None = None  # only these may come
    bad_words: list[str] | None = None  # texts whose last token is not drawn after the others of the output
    logits_processors: list[str] | None = None  # import paths "module:function" that the operator has allowed
    seed: int | None = None  # [-2^63, 2^64); None draws one at random
    max_tokens: int | None = 16  # ≥ 1; None: up to max_model_len
    min_tokens: int = 0  # no stop before this many tokens; tokens that would stop are not drawn
    stop: str | list[str] | None = None  # text that ends the answer; not part of it
    stop_token_ids: list[int] | None = None  # tokens that end the answer; the token is part of token_ids, not of text
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # go on after the model's end token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    spaces_between_special_tokens: bool = True  # between special tokens that are shown, where the tokenizer puts one
    logprobs: int | None = None  # ≥ 0: of each token, and of this many likeliest at its place
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    truncate_prompt_tokens: int | None = (
        None  # ≥ 1: the prompt's last so many; -1: as many as leave room for max_tokens
    )
    output_kind: OutputKind = "cumulative"  # of a stream's outputs: all so far, what is new, or one at the end
    priority: int = 0  # lower runs first, with --scheduling-policy priority
    timeout_s: float | None = None  # > 0: end with finish_reason timeout this long after arrival
    queue_timeout_s: float | None = None  # > 0: the same for a request that has not begun to run
    cache_salt: str | None = None  # prefixes are shared only among requests of the same salt
    structured_outputs: StructuredOutputsParams | None = (
        None  # what the text must conform to; a dict of its fields does too
    )

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
        self._check_counts()
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and 0 < len(self.cache_salt) <= 1024):
            raise RequestError("cache_salt must be a string of 1 to 1024 characters")
        self._check_stops()
        self._check_logit_rules()
        if self.structured_outputs is not None:
            structured = StructuredOutputsParams.of(self.structured_outputs)
            msgspec.structs.force_setattr(self, "structured_outputs", structured)

    def _check_counts(self) -> None:
        _check_int("n", self.n, 1, MAX_CHILDREN)
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n}: choosing among more answers than are returned is not "
                "offered; ask for n answers with logprobs=0 and choose by cumulative_logprob"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, 2**31 - 1)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        if self.output_kind not in ("cumulative", "delta", "final_only"):
            raise RequestError(f"output_kind must be cumulative, delta or final_only, got {self.output_kind!r}")

    def _check_logit_rules(self) -> None:
        if len(self.logit_bias or ()) > MAX_LOGIT_BIASES:
            raise RequestError(f"logit_bias has {len(self.logit_bias or ())} tokens, at most {MAX_LOGIT_BIASES}")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0, low_open=False)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, so that no token could come: name at least 1")
        for token_id in self.allowed_token_ids or ():
            _check_int("allowed_token_ids", token_id, 0, 2**31 - 1)
        for name, words, most in (
            ("bad_words", self.bad_words, MAX_BAD_WORDS),
            ("logits_processors", self.logits_processors, MAX_LOGITS_PROCESSORS),
        ):
            if len(words or ()) > most:
                raise RequestError(f"{name} has {len(words or ())} strings, at most {most} are allowed")
            for word in words or ():
                if not isinstance(word, str) or not word.strip():
                    raise RequestError(f"{name} holds {word!r}: each must be a string that is not blank")

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


def child_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request whose seed, given or drawn, is `seed`."""
    return seed + index if seed + index < 2**64 else seed + index - 2**64


_FLOAT_RANGES: dict[str, tuple[float, float, bool]] = {  # name: (low, high, low is excluded)
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 100.0, True),
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
