"""Messages between the core and its workers. Core → all ranks, PUB/SUB: SchedulerOutput and other numbered orders.
Workers → core, PUSH/PULL: rank 0's ModelRunnerOutput, and acknowledgements and errors of every rank."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..params.pooling_params import PoolingParams
from .adapter import NO_SLOT, FillSlot, SlotContent
from .base import BulkArray, Holding, Message, Rank
from .core import LogprobColumns
from .media import Encode, FailedEntry


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a row, with the ranges of SamplingParams."""

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
    min_tokens: int = 0  # output tokens before stop_token_ids are allowed
    stop_token_ids: bytes = b""  # int32
    logits_processors: list[int] = []  # indices into --allowed-logits-processors
    extra_args: dict[str, object] = {}  # for logits_processors that take them
    thought_markers: list[bytes] = []  # int32: tokens that start reasoning, and that end it; or empty
    thinking_token_budget: int = 0  # reasoning tokens after which the end is forced
    constraint_begins: list[bytes] = []  # int32: behind the first of them no reasoning counts
    trace_token_ids: bytes = b""  # int32: forced output tokens, independent of logits
    num_logprobs: int = -1  # likeliest alternatives per sampled token; -1: no logprobs
    logprob_token_ids: bytes = b""  # int32 [num_logprobs]: alternatives instead of the likeliest
    num_prompt_logprobs: int = -1  # likeliest alternatives per prompt token; -1: no logprobs
    prompt_logprobs_start: int = 1  # first prompt token that gets logprobs


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that starts or resumes in `row`."""

    row: int
    token_ids: bytes  # prompt + outputs so far
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    sampling: RowSampling
    pooling: PoolingParams | None = None  # return an embedding after the prompt's last token instead of sampling
    adapter_slot: int = NO_SLOT  # a slot that is filled on every rank
    spans: bytes = b""  # int32 [m, 5]: start, length and grid of each medium of the prompt, in order


class StepMessage(Message, frozen=True, kw_only=True):
    """Base class of the messages about one step, or about an order that is numbered like a step."""

    step: int  # numbered without gaps from 1 in each (core_epoch, generation)
    core_epoch: int
    generation: int


class SchedulerOutput(StepMessage, frozen=True, kw_only=True, tag="step"):
    """One step. A worker copies the blocks of `stores`, then those of `loads`; frees rows, adds new ones, appends
    blocks and tokens; then computes `counts[i]` tokens of each `rows[i]`. A step may have no rows: it only copies
    blocks, fills adapter slots or encodes media.

    A row continues after the tokens that it has computed. A row that computes its last known token samples one, which
    becomes its next known token, or returns its embedding. A row with drafts, which are guesses of the tokens after
    its last known one, computes these too, samples after each, and keeps the samples up to the first that differs from
    its draft. If the model's layers keep a state, a step with drafts does not update that of the row, and the row's
    next step computes its tokens again.
    """

    rows: bytes  # int32 [n]
    counts: bytes  # int32 [n], each ≥ 1
    freed_rows: bytes = b""  # int32
    new_rows: list[NewRow] = []
    block_appends: bytes = b""  # int32 [m, 3]: row, KV group, block id; in table order for each row and group. In a
    # group with a window the id may be 0, the null block, for tokens that no later token sees
    block_frees: bytes = b""  # int32 [m, 3]: row, KV group, n: the first n entries of the table are the null block from
    # this step on, which appends a block to it. They end behind the window of the first token that may be computed next
    state_moves: bytes = b""  # int32 [m, 4]: row, KV group, position, block id; positions of a row ascend. From this
    # step on tokens of the row from `position` on update the state in the block; the block before keeps the state at
    # `position`. A row behind cached tokens first gets, with position 0, the block with their state
    token_appends: bytes = b""  # int32, for each row: row, n, n forced tokens, after its sampled ones
    drafts: bytes = b""  # int32, for each row that has any: row, n, n guesses, the last n of its `counts`
    draft_limits: bytes = b""  # int32 [m, 2]: row, and how many drafts the draft model makes, at most, of the tokens
    # after the last one that the row has once the step is computed. Their keys and values may fill the row's blocks
    least_chance: float = 0.0  # a row gets no further draft once that all of its drafts are right is less likely
    is_mask_pending: bool = False  # rank 0 waits for this step's TokenMask before it samples
    stores: bytes = b""  # int32 [m, 2]: block, and the slot of the arena to copy it to
    loads: bytes = b""  # int32 [m, 2]: slot, and the block to copy it to
    fills: list[FillSlot] = []  # begun before the step, finished some time later
    encodes: list[Encode] = []  # run before the step's rows, in this order
    freed_entries: bytes = b""  # int32: entries of the encoder cache that are free before this step's encodes
    span_entries: bytes = b""  # int32 [m, 3]: row, index of a span, its complete entry; from this step on


class TokenMask(StepMessage, frozen=True, kw_only=True, tag="mask"):
    """Tokens that rows with a grammar may sample in `step`; rows that have ended since its SchedulerOutput are left
    out."""

    rows: bytes  # int32 [n]
    bits: bytes  # uint32 [sum(counts), ceil(vocab_size / 32)]: bit t % 32 of word t / 32 is set if token t is allowed
    counts: bytes = b""  # int32 [n]: masks of each row, for its next token and after its first drafts; empty: 1


class ReloadWeights(StepMessage, frozen=True, kw_only=True, tag="reload_weights"):
    """Order in place of a step: every rank drops its rows, changes its memory to `holding` and sends ControlAck."""

    holding: Holding


class Profile(StepMessage, frozen=True, kw_only=True, tag="profile"):
    """Order in place of a step: every rank starts a trace, or writes it to a file, and sends ControlAck."""

    records: bool


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """Test message, repeated until every rank has replied, because PUB drops messages before a SUB has joined."""

    core_epoch: int
    generation: int


CoreToWorker: TypeAlias = SchedulerOutput | TokenMask | ReloadWeights | Profile | Probe


class ProbeAck(Message, frozen=True, kw_only=True, tag="probe_ack"):
    """Reply to a Probe. The core that sent the Probe may use `slots` at once: a rank takes a slot off the list when a
    FillSlot for it arrives, and lists it again when all its fills, which may be from several cores, are done."""

    rank: Rank
    core_epoch: int
    generation: int
    slots: list[SlotContent] = []  # adapters that the rank already holds, loaded for an earlier core


class SlotFilled(StepMessage, frozen=True, kw_only=True, tag="slot_filled"):
    """Reply of each rank to each FillSlot, once, when the slot may be used or the load has failed; none to the orders
    of a core that another one has replaced. `step` is the step with the FillSlot. A rank fills one slot after the
    other, in the order of the steps."""

    rank: Rank
    slot: int
    digest: bytes
    duration_s: float = 0.0
    num_bytes: int = 0
    error: str = ""  # why the slot stays empty; "" if it is filled


class ControlAck(StepMessage, frozen=True, kw_only=True, tag="control_ack"):
    rank: Rank
    error: str = ""  # why a Profile failed, which is not fatal


class RowLogprobs(LogprobColumns, frozen=True, kw_only=True, omit_defaults=True):
    """Logprobs of one step's tokens, by the rows of their requests."""

    rows: bytes = b""  # int32 [n]
    positions: bytes = b""  # int32 [n]: index of the token in prompt + output


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of the prompt in `row`."""

    row: int
    vector: BulkArray


class DraftWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The drafts that the draft model has made after a step, and what they took."""

    drafts: bytes = b""  # int32, for each row that has any: row, n, n guesses of the tokens after its last one
    chances: bytes = b""  # float32 for each guess: its probability by the draft model, after the guesses before it
    num_passes: int = 0  # through the draft model
    num_late_tokens: int = 0  # computed by it now, which were known before the step
    duration_s: float = 0.0


class ModelRunnerOutput(StepMessage, frozen=True, kw_only=True, tag="result"):
    """Result of a step from rank 0: the rows that sampled, in the order of the SchedulerOutput."""

    rows: bytes  # int32
    counts: (
        bytes  # int32: tokens per row, at most 1 + its drafts; 0: its next step computes its last known token again,
    )
    # which only rows without a state can
    token_ids: bytes  # int32, flat
    execute_s: float = 0.0  # seconds that the step took on rank 0
    logprobs: RowLogprobs | None = None  # of sampled tokens
    prompt_logprobs: RowLogprobs | None = None
    fully_masked_rows: bytes = b""  # int32: rows without any allowed token; ignore their token_ids
    pooled: list[Pooled] = []  # embeddings of prompts that end in this step
    failed_entries: list[FailedEntry] = []  # of this step's encodes
    draft_work: DraftWork | None = None  # None: the step asked for no drafts


class Resend(Message, frozen=True, kw_only=True, tag="resend"):
    """Request of a worker that missed messages: repeat all messages from `from_step` on."""

    rank: Rank
    generation: int
    from_step: int


class WorkerError(Message, frozen=True, kw_only=True, tag="worker_error"):
    """Report that a step failed on a rank, so that the group cannot continue."""

    rank: Rank
    generation: int
    step: int
    phase: str
    message: str


WorkerToCore: TypeAlias = ProbeAck | SlotFilled | ModelRunnerOutput | ControlAck | Resend | WorkerError
