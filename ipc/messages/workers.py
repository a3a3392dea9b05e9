"""core → workers, PUB/SUB: numbered SchedulerOutput, the same to every rank. workers → core, PUSH/PULL:
ModelRunnerOutput of rank 0, errors of every rank."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..pooling_params import PoolingParams
from .base import Holding, Message
from .core import LogprobColumns, Pooled


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a row are drawn; ranges as in SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: bytes = b""  # int32
    bias_values: bytes = b""  # float32
    allowed_token_ids: bytes = b""  # int32; empty: all
    bad_words: list[bytes] = []  # int32: the tokens of each
    min_tokens: int = 0  # output tokens before one of stop_token_ids may be drawn
    stop_token_ids: bytes = b""  # int32
    logits_processors: list[int] = []  # their places in --allowed-logits-processors
    extra_args: dict[str, object] = {}  # of the request, for those of them that take it
    thought_markers: list[bytes] = []  # int32: the tokens that begin a thought and those that end it; or none
    thinking_token_budget: int = 0  # tokens between them, after which the end is forced
    thinks_once: bool = False  # what comes after the first thought has none
    trace_token_ids: bytes = b""  # int32: the output tokens that come, whatever the logits are
    num_logprobs: int = -1  # likeliest tokens beside each sampled one; -1: no logprobs
    logprob_token_ids: bytes = b""  # int32: beside each sampled token these instead; as many as num_logprobs
    num_prompt_logprobs: int = -1  # the same for the prompt's tokens
    prompt_logprobs_start: int = 1  # the first prompt token whose logprobs are wanted


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that starts or resumes on `row`."""

    row: int
    token_ids: bytes  # prompt + outputs so far
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    sampling: RowSampling
    pooling: PoolingParams | None = None  # the row samples nothing: its last token gives a vector


class SchedulerOutput(Message, frozen=True, kw_only=True, tag="step"):
    """One step. A worker frees, admits, appends blocks and tokens, then computes `counts[i]` tokens of each `rows[i]`.

    A row's first token of the step is the one after those it computed before. A row whose last known token is
    computed in this step samples one token, which becomes its next known token, or gives the vector it is there for.
    """

    step: int  # numbered without gaps from 1 in each (core_epoch, generation)
    core_epoch: int
    generation: int
    rows: bytes  # int32 [n]
    counts: bytes  # int32 [n], each ≥ 1
    freed_rows: bytes = b""  # int32
    new_rows: list[NewRow] = []
    block_appends: bytes = b""  # int32 [m, 3]: row, KV group (0), block id; in table order for each row
    token_appends: bytes = b""  # int32, for each row: row, n, n tokens that follow those it has sampled, undrawn
    is_mask_pending: bool = False  # a TokenMask for this step follows: rank 0 waits for it before it samples


class TokenMask(Message, frozen=True, kw_only=True, tag="mask"):
    """Which tokens rows with a grammar may sample in `step`; other rows are left out, and rows that were lost since."""

    step: int
    core_epoch: int
    generation: int
    rows: bytes  # int32 [n]
    bits: bytes  # uint32 [n, ceil(vocab_size / 32)]: bit t % 32 of word t / 32 is set where token t is allowed


class ReloadWeights(Message, frozen=True, kw_only=True, tag="reload_weights"):
    """Takes the place of a step: every rank drops its rows, holds what it shall and says ControlAck."""

    step: int
    core_epoch: int
    generation: int
    holding: Holding


class Profile(Message, frozen=True, kw_only=True, tag="profile"):
    """Takes the place of a step: every rank begins to record its operations, or writes the record to a file, and says
    ControlAck."""

    step: int
    core_epoch: int
    generation: int
    records: bool


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """Sent until every rank has answered: PUB drops what is sent before a SUB has joined."""

    core_epoch: int
    generation: int


CoreToWorker: TypeAlias = SchedulerOutput | TokenMask | ReloadWeights | Profile | Probe


class ProbeAck(Message, frozen=True, kw_only=True, tag="probe_ack"):
    rank: int
    core_epoch: int
    generation: int


class ControlAck(Message, frozen=True, kw_only=True, tag="control_ack"):
    rank: int
    step: int
    core_epoch: int
    generation: int
    error: str = ""  # why a Profile failed, which ends nothing


class ModelRunnerOutput(Message, frozen=True, kw_only=True, tag="result"):
    """What rank 0 sampled in a step: rows in the order of the SchedulerOutput, those that did not sample left out."""

    step: int
    core_epoch: int
    generation: int
    rows: bytes  # int32
    counts: bytes  # int32: tokens of each row; one without any computes its last known token again in its next step
    token_ids: bytes  # int32, flat
    execute_s: float = 0.0  # seconds that the step took on this rank
    logprobs: LogprobColumns | None = None  # of sampled tokens, for rows that asked; positions are not filled in
    prompt_logprobs: LogprobColumns | None = None
    fully_masked_rows: bytes = b""  # int32: their rules leave no token; what stands for them in token_ids is void
    pooled: list[Pooled] = []  # of the rows whose prompts to embed end in this step


class Resend(Message, frozen=True, kw_only=True, tag="resend"):
    """A worker saw a gap: send again everything from `from_step`."""

    rank: int
    generation: int
    from_step: int


class WorkerError(Message, frozen=True, kw_only=True, tag="worker_error"):
    """A step failed on a rank; the group cannot go on."""

    rank: int
    generation: int
    step: int
    phase: str
    message: str


WorkerToCore: TypeAlias = ProbeAck | ModelRunnerOutput | ControlAck | Resend | WorkerError
