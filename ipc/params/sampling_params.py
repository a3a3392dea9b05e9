"""SamplingParams: parameters of a request, validated at construction, at submission and on arrival.

Checks the limits that hold for every model; the input processor checks those of vocabulary and length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from ..digits import whole_number
from ..errors import RequestError
from .public_struct import PublicStruct
from .structured_outputs import StructuredOutputsParams

MAX_CHILDREN = 128
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGITS_PROCESSORS = 8
MAX_SALT_CHARACTERS = 1024
RETENTION_S = {"in-memory": 0.0, "in_memory": 0.0, "5m": 300.0, "1h": 3600.0, "24h": 86400.0}  # of OpenAI, Anthropic
MAX_LOGPROB_TOKEN_IDS = 128
MAX_EXTRA_ARGS_BYTES = 1 << 16  # as JSON
MAX_PATTERN_SIZE, MAX_PATTERNS = 256, 128  # limits of repetition_detection, which bound its work per token
_LISTS = (list, tuple, set, frozenset)  # accepted types of list fields

OutputKind: TypeAlias = Literal["cumulative", "delta", "final_only"]
CutSide: TypeAlias = Literal["left", "right"]
ServiceTier: TypeAlias = Literal["default", "flex"]


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=PublicStruct
):
    """Settings to end an answer (finish_reason repetition) when its last tokens repeat a pattern `min_count` times."""

    max_pattern_size: int = 0  # tokens of the longest pattern; 0: off
    min_pattern_size: int = 0  # tokens of the shortest pattern; 0 means 1
    min_count: int = 0  # ≥ 2

    def __post_init__(self) -> None:
        Range(int, 0, MAX_PATTERN_SIZE).check("repetition_detection.max_pattern_size", self.max_pattern_size)
        Range(int, 0, self.max_pattern_size).check("repetition_detection.min_pattern_size", self.min_pattern_size)
        if self.max_pattern_size:
            Range(int, 2, MAX_PATTERNS).check("repetition_detection.min_count", self.min_count)


class SamplingParams(
    msgspec.Struct,
    kw_only=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=PublicStruct,
):
    """Parameters of sampling, output and end of one request.

    Fields may be assigned. Submission takes a validated copy (`checked`), which later assignments do not change.

    The token at a position is argmax(logit / T − log E) over the tokens that the filters keep. E is exponential noise
    from a counter-based generator keyed by `seed`, token id and position: a seed gives the same noise in any batch and
    after any restart, and the same tokens if logits are equal to the bit (--deterministic). Names, meanings and the
    order of operations are vLLM's:

        1. logprobs are computed from the model's logits, before anything below;
           structured_outputs: tokens that cannot continue a conforming text become −∞
        2. allowed_token_ids: all others become −∞
        3. bad_words: the token that would complete one becomes −∞
        4. min_tokens: until then the tokens that would end the answer become −∞
        5. logit_bias is added
        6. logits_processors, in their order
        7. repetition_penalty (tokens of prompt and output: a positive logit is divided by it, a negative one
           multiplied), then frequency_penalty × count and presence_penalty (tokens of the output) are subtracted
        8. temperature 0 takes the largest logit; else logits are divided by the temperature
        9. min_p, then top_k, then top_p drop tokens, each from those that the one before kept
        10. thinking_token_budget: when it is used up, only the end-of-thinking token is kept
        11. trace_decode_token_ids: only the next of them is kept
        12. the draw
    """

    n: int = 1  # answers to make, 1 to MAX_CHILDREN; answer i draws with seed + i
    best_of: int | None = None  # must equal n: all generated answers are returned
    temperature: float = 1.0  # ≥ 0; 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 keeps all
    top_p: float = 1.0  # (0, 1]: keep the likeliest tokens whose probabilities first reach top_p
    min_p: float = 0.0  # [0, 1]: keep tokens at least min_p as likely as the likeliest
    presence_penalty: float = 0.0  # [-2, 2]: subtracted from the logit of each token in the output
    frequency_penalty: float = 0.0  # [-2, 2]: the same, times the token's count in the output
    repetition_penalty: float = 1.0  # above 0, to 100: above 1 discourages tokens of prompt and output
    logit_bias: dict[int, float] | None = None  # token id: [-100, 100], added to its logit
    allowed_token_ids: list[int] | None = None  # sample only these
    bad_words: list[str] | None = None  # texts whose last token is not sampled after their other tokens
    logits_processors: list[str] | None = None  # import paths "module:function" that the operator has allowed
    seed: int | None = None  # [-2^63, 2^64); None draws one at random
    max_tokens: int | None = 16  # 0 only scores the prompt; None: up to max_model_len
    min_tokens: int = 0  # before this many tokens none that would end the answer is sampled
    stop: str | list[str] | None = None  # strings that end the answer and are not part of it
    stop_token_ids: list[int] | None = None  # tokens that end the answer: part of token_ids, not of text
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # continue after the model's end token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    spaces_between_special_tokens: bool = True  # in the text, if the tokenizer puts them there
    detokenize: bool = True  # produce text
    logprobs: int | None = None  # ≥ 0: return those of each token and this many likeliest alternatives; -1: of all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logprob_token_ids: list[int] | None = None  # alternatives instead of the likeliest tokens
    flat_logprobs: bool = False  # return FlatLogprobs, in columns, instead of a dict per token
    trace_decode_token_ids: list[int] | None = None  # a forced answer, cut at max_tokens
    thinking_token_budget: int | None = None  # ≥ 0: reasoning tokens until their end is forced; -1: no limit
    truncate_prompt_tokens: int | None = None  # ≥ 1: keep the prompt's last tokens; -1: leave room for max_tokens
    truncation_side: CutSide | None = None  # side to truncate; right keeps the first tokens. None: left
    output_kind: OutputKind = "cumulative"  # everything so far, only the new part, or one at the end
    priority: int = 0  # lower runs first, with --scheduling-policy priority
    service_tier: ServiceTier = "default"  # flex: run only in what requests of the default class leave
    timeout_s: float | None = None  # > 0: end with finish_reason timeout this long after arrival
    queue_timeout_s: float | None = None  # > 0: the same if the request has not begun to run by then
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    prompt_cache_key: str | None = None  # requests with the same one go to the same replica
    prompt_cache_retention: str | None = None  # a name in RETENTION_S: blocks of the prompt are kept so long
    skip_reading_prefix_cache: bool | None = None  # compute the prompt even if the prefix cache has it
    repetition_detection: RepetitionDetectionParams | None = None  # end an answer that repeats itself; or a dict
    extra_args: dict[str, object] | None = None  # JSON, for logits_processors that take it
    structured_outputs: StructuredOutputsParams | None = None  # constraint on the text; or a dict of its fields
    guided_decoding: StructuredOutputsParams | None = None  # former name of structured_outputs
    # Accepted for vLLM's users, without effect; _NO_OPS lists the only allowed values of some of them.
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    output_text_buffer_length: int = 0
    prompt_logprob_start: None = None
    prompt_logprob_token_ids: None = None
    routed_experts_prompt_start: int = 0
    skip_clone: bool = False
    stream_interval: int | None = None
    watermarking: bool | None = None
    _real_n: int | None = None

    def __post_init__(self) -> None:
        for name, (no_ops, mend) in _NO_OPS.items():
            if getattr(self, name) not in no_ops:
                raise RequestError(f"{name} is {getattr(self, name)!r:.80}, which is not offered: {mend}")
        for name, limits in RANGES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                limits.check(name, getattr(self, name))
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            LENGTH.check("truncate_prompt_tokens", self.truncate_prompt_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: lower it")
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n}: choosing among more answers than are returned is not "
                "offered; ask for n answers with logprobs=0 and choose by cumulative_logprob"
            )
        if self._real_n is not None and self._real_n != self.n:
            raise RequestError(f"_real_n is {self._real_n} and n is {self.n}: give n alone")
        if self.output_kind not in ("cumulative", "delta", "final_only"):
            raise RequestError(f"output_kind must be cumulative, delta or final_only, got {self.output_kind!r}")
        if self.service_tier not in ("default", "flex"):
            raise RequestError(f"service_tier must be default or flex, got {self.service_tier!r:.80}")
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_CHARACTERS):
            raise RequestError(f"cache_salt must be a string of 1 to {MAX_SALT_CHARACTERS} characters")
        self._check_cache()
        self._check_strings()
        self._check_token_ids()
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.extra_args is not None:
            self.extra_args = _json_copy("extra_args", self.extra_args)
        if self.repetition_detection is not None:
            try:  # vLLM's own class has the same attributes
                found = msgspec.convert(self.repetition_detection, RepetitionDetectionParams, from_attributes=True)
            except msgspec.ValidationError as error:
                raise RequestError(str(error.__cause__ or f"repetition_detection: {error}")) from None
            self.repetition_detection = found
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError("guided_decoding is the former name of structured_outputs: give the latter alone")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if self.trace_decode_token_ids is not None and (self.n != 1 or self.structured_outputs is not None):
            raise RequestError(
                f"trace_decode_token_ids requires n=1, got {self.n}, and is not supported with structured outputs: it "
                "is the one answer that is made"
            )

    def _check_cache(self) -> None:
        if self.prompt_cache_retention not in (None, *RETENTION_S):
            names, given = ", ".join(RETENTION_S), self.prompt_cache_retention
            raise RequestError(f"prompt_cache_retention must be one of {names}, got {given!r:.80}")
        key = self.prompt_cache_key
        if key is not None and not (isinstance(key, str) and len(key) <= MAX_SALT_CHARACTERS):
            raise RequestError(f"prompt_cache_key must be a string of at most {MAX_SALT_CHARACTERS} characters")

    def _check_strings(self) -> None:
        for name, strings, most in (
            ("stop", [self.stop] if isinstance(self.stop, str) else self.stop or (), MAX_STOP_STRINGS),
            ("bad_words", self.bad_words or (), MAX_BAD_WORDS),
            ("logits_processors", self.logits_processors or (), MAX_LOGITS_PROCESSORS),
        ):
            if not isinstance(strings, _LISTS):
                raise RequestError(f"{name} must be a list of strings, got {strings!r:.80}")
            if len(strings) > most:
                raise RequestError(f"{name} has {len(strings)} strings, at most {most} are allowed")
            for string in strings:
                if not isinstance(string, str) or not string:
                    raise RequestError(f"{name} holds {string!r}: each must be a string of at least 1 character")
                if name != "stop" and not string.strip():
                    raise RequestError(f"{name} holds {string!r:.80}: each must be a string that is not blank")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs the text, which detokenize=False leaves out: use stop_token_ids")

    def _check_token_ids(self) -> None:
        for name in ("allowed_token_ids", "trace_decode_token_ids"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise RequestError(f"{name} is empty, so that no token could come: name at least 1")
        if not isinstance(self.logit_bias, dict | None):
            raise RequestError(f"logit_bias must be a dict of token ids and numbers, got {self.logit_bias!r:.80}")
        for name, token_ids, most in (
            ("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", self.allowed_token_ids or (), _MAX_INT),
            ("logit_bias", tuple(self.logit_bias or ()), MAX_LOGIT_BIASES),
            ("logprob_token_ids", self.logprob_token_ids or (), MAX_LOGPROB_TOKEN_IDS),
            ("trace_decode_token_ids", self.trace_decode_token_ids or (), _MAX_INT),
        ):
            if not isinstance(token_ids, _LISTS):
                raise RequestError(f"{name} must be a list of token ids, got {token_ids!r:.80}")
            if len(token_ids) > most:
                raise RequestError(f"{name} has {len(token_ids)} tokens, at most {most} are allowed")
            for token_id in token_ids:
                _TOKEN_ID.check(name, token_id)
        for token_id, bias in (self.logit_bias or {}).items():
            _BIAS.check(f"logit_bias[{token_id}]", bias)
        num_ids = len(self.logprob_token_ids or ())
        if num_ids and self.logprobs not in (None, num_ids):
            raise RequestError(
                f"logprobs is {self.logprobs} and logprob_token_ids has {num_ids} tokens, which come instead of the "
                "likeliest: leave one out"
            )

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Return parameters with the given fields; None means the default, except for max_tokens. Keys of logit_bias
        may be text, as in JSON. RequestError if a value is invalid, TypeError if there is no such field."""
        given = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            ids = {key: key if isinstance(key, int) else whole_number(str(key).strip()) for key in bias}
            if bad := [key for key, token_id in ids.items() if token_id is None]:
                raise RequestError(f"logit_bias has the keys {bad!r:.80}: keys are token ids")
            given["logit_bias"] = {ids[key]: value for key, value in bias.items()}
        return cls(**given)

    def clone(self) -> SamplingParams:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def checked(self) -> SamplingParams:
        """Return a validated copy that later changes of this object do not affect."""
        held = {name: getattr(self, name) for name in _CONTAINERS}
        return self.replace(**{name: copy.copy(value) for name, value in held.items() if value})

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token that get logprobs; -1: the whole vocabulary; None: no logprobs."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def is_flex(self) -> bool:
        return self.service_tier == "flex"

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def traced(self, room: int) -> SamplingParams:
        """Return a copy in which only the forced answer (trace_decode_token_ids) ends the request, after at most
        max_tokens and `room` tokens; this object if no answer is forced."""
        trace = self.trace_decode_token_ids
        if trace is None:
            return self
        max_tokens = min(len(trace), room if self.max_tokens is None else self.max_tokens, room)
        ends = {"min_tokens": 0, "ignore_eos": True, "stop": None, "stop_token_ids": None, "repetition_detection": None}
        return self.replace(trace_decode_token_ids=trace[: max(max_tokens, 1)], max_tokens=max_tokens, **ends)

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a validated copy with `changes`."""
        return msgspec.structs.replace(self, **changes)


def child_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index`: seed + index, minus 2^64 if the sum is 2^64 or more. `seed`: the request's."""
    return seed + index if seed + index < 2**64 else seed + index - 2**64


class Range(NamedTuple):
    """Integers or real numbers in [low, high] or (low, high]."""

    kind: type[int] | type[float]
    low: float
    high: float
    excludes_low: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise RequestError unless `value`, of the parameter `name`, is in the range."""
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        if isinstance(value, (int, float)) and is_number:
            is_above = value > self.low if self.excludes_low else value >= self.low
            if is_above and value <= self.high:
                return
        form = "d" if self.kind is int else "g"
        limits = f"{'(' if self.excludes_low else '['}{self.low:{form}}, {self.high:{form}}]"
        kind = "" if is_number else "an integer " if self.kind is int else "a number "
        raise RequestError(f"{name} must be {kind}in {limits}, got {value!r}")


_MAX_INT = 2**31 - 1
LENGTH = Range(int, 1, _MAX_INT)
_TOKEN_ID, _BIAS = Range(int, 0, _MAX_INT), Range(float, -100, 100)
TIMEOUT_S = Range(float, 0, 1e9, excludes_low=True)
RANGES = {
    "temperature": Range(float, 0, 100),
    "top_p": Range(float, 0, 1, excludes_low=True),
    "min_p": Range(float, 0, 1),
    "presence_penalty": Range(float, -2, 2),
    "frequency_penalty": Range(float, -2, 2),
    "repetition_penalty": Range(float, 2**-126, 100),  # float32's smallest normal; with 0, 0 × −∞ would be NaN
    "timeout_s": TIMEOUT_S,
    "queue_timeout_s": TIMEOUT_S,
    "n": Range(int, 1, MAX_CHILDREN),
    "top_k": Range(int, -1, _MAX_INT),
    "seed": Range(int, -(2**63), 2**64 - 1),
    "max_tokens": Range(int, 0, _MAX_INT),
    "min_tokens": Range(int, 0, _MAX_INT),
    "priority": Range(int, -_MAX_INT - 1, _MAX_INT),
    "logprobs": Range(int, -1, _MAX_INT),
    "prompt_logprobs": Range(int, -1, _MAX_INT),
    "thinking_token_budget": Range(int, -1, _MAX_INT),
    "routed_experts_prompt_start": Range(int, 0, _MAX_INT),
}
_OPTIONAL = {  # None is valid
    *("seed", "max_tokens", "logprobs", "prompt_logprobs", "timeout_s", "queue_timeout_s", "thinking_token_budget"),
}
_CONTAINERS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "logits_processors", "stop", "stop_token_ids"),
    *("logprob_token_ids", "trace_decode_token_ids"),
)
_BEAMS = "it belongs to beam search, which is LLM.beam_search"
_NO_OPS: dict[str, tuple[tuple[object, ...], str]] = {  # values without effect, and advice for other values
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1.0,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "output_text_buffer_length": ((0,), "text is held back only for stop strings"),
    "prompt_logprob_start": ((None,), "prompt_logprobs scores the whole prompt"),
    "prompt_logprob_token_ids": ((None,), "use prompt_logprobs"),
    "skip_clone": ((False, True), "give True or False"),
    "stream_interval": ((None, 1), "every token is streamed as soon as it can be"),
    "watermarking": ((None, False), "no watermark is set"),
}


def _json_copy(name: str, value: object) -> dict[str, object]:
    """Return a deep copy of `value`; RequestError unless it is a JSON object of limited size."""
    try:
        text = msgspec.json.encode(value)
        copied = msgspec.json.decode(text)
        msgspec.msgpack.encode(copied)  # raises for integers above 64 bits
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{name} must hold JSON values: {error}") from None
    if not isinstance(copied, dict) or copied != value:
        raise RequestError(f"{name} must be a dict of JSON values, got {value!r:.80}")
    if len(text) > MAX_EXTRA_ARGS_BYTES:
        raise RequestError(f"{name} has {len(text)} bytes as JSON, at most {MAX_EXTRA_ARGS_BYTES} are allowed")
    return copied
