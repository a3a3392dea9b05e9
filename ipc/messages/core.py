"""frontend ⇄ core, DEALER/ROUTER: EngineCoreRequest in, columns out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from ..errors import ErrorInfo
from ..pooling_params import PoolingParams
from ..sampling_params import SamplingParams
from .base import (
    BulkArray,
    EngineAction,
    FinishReason,
    Hello,
    MemoryTag,
    Message,
    Ping,
    Pong,
    Refused,
    Unknown,
    Welcome,
)
from .client import PauseMode


class CoreChild(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer to make: `key` is the frontend's number for it, unique on its connection, in [0, 2^31)."""

    key: int
    seed: int
    output_token_ids: bytes = b""


class EngineCoreRequest(Message, frozen=True, kw_only=True, tag="request"):
    """A validated request: tokens and parameters. All that a core needs to start or resume it."""

    children: list[CoreChild]
    prompt_token_ids: bytes
    params: SamplingParams
    max_tokens: int  # resolved against max_model_len
    stop_token_ids: list[int]  # the model's end tokens included, unless ignored
    arrival_time: float
    pooling: PoolingParams | None = None  # of a request of kind pool
    attempt: int = 0
    bad_words: list[bytes] = []  # int32: the tokens of each
    logits_processors: list[int] = []  # their places in --allowed-logits-processors
    thought_markers: list[bytes] = []  # int32: the tokens that begin and end a thought, for thinking_token_budget
    thought_end: bytes = b""  # int32: tokens of the answer after which its grammar holds; none: from the first on
    num_prompt_logprobs: int = 0  # prompt tokens, the first included, whose logprobs are known already

    @property
    def kind(self) -> Literal["generate", "pool"]:
        """generate: tokens that follow the prompt. pool: a vector of the prompt, which ends with it."""
        return "generate" if self.pooling is None else "pool"


class EngineControl(Message, frozen=True, kw_only=True, tag="engine_control"):
    """A client's Control, checked; answered by ControlDone."""

    control_id: int
    action: EngineAction
    mode: PauseMode = "keep"
    model_folder: str = ""
    sleep_level: int = 1
    tags: list[MemoryTag] | None = None


class AbortRequests(Message, frozen=True, kw_only=True, tag="abort_requests"):
    """Free these answers; each is answered by Finished(abort) unless it is unknown or finished already."""

    keys: list[int]


FrontendToCore: TypeAlias = Hello | EngineCoreRequest | AbortRequests | EngineControl | Ping


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: int
    reason: FinishReason
    num_preemptions: int = 0
    error: ErrorInfo | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer left the queue for the first time."""

    key: int
    num_cached_tokens: int = 0


class LogprobColumns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Logprobs of n tokens of any rows, each the token itself and then the likeliest by falling logprob."""

    owners: bytes = b""  # int32 [n]: row or, from core to frontend, key
    positions: bytes = b""  # int32 [n]: index of the token in prompt + output; to the frontend: in prompt or output
    widths: bytes = b""  # int32 [n]: 1 + how many of the likeliest
    ranks: bytes = b""  # int32 [n]: of the token itself; 1 = likeliest
    token_ids: bytes = b""  # int32, flat: sum(widths)
    logprobs: bytes = b""  # float32, flat

    @classmethod
    def join(cls, parts: Sequence[LogprobColumns]) -> LogprobColumns | None:
        """All of them in one, in this order; None for none."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        return cls(**{name: b"".join(getattr(part, name) for part in parts) for name in cls.__struct_fields__})


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a prompt that was to be embedded."""

    owner: int  # row or, from core to frontend, key
    vector: BulkArray


class EngineCoreOutputs(Message, frozen=True, kw_only=True, tag="outputs"):
    """All that one turn of the core brought for one frontend, in columns: one entry per answer that got tokens."""

    keys: bytes = b""  # int32
    starts: bytes = b""  # int32: output index of the first token
    counts: bytes = b""  # int32: tokens per entry
    token_ids: bytes = b""  # int32, flat: sum(counts)
    accepted: list[int] = []  # keys of first children, each once per submit
    started: list[Started] = []
    finished: list[Finished] = []  # after their last tokens
    logprobs: LogprobColumns | None = None  # of tokens in here; a later entry of a key is of a later token
    prompt_logprobs: LogprobColumns | None = None  # of the prompts of first children
    pooled: list[Pooled] = []  # each with its key's Finished


class ControlDone(Message, frozen=True, kw_only=True, tag="control_done"):
    """Answers EngineControl once it is so."""

    control_id: int
    error: ErrorInfo | None = None


CoreToFrontend: TypeAlias = Welcome | Refused | Unknown | EngineCoreOutputs | ControlDone | Pong
