"""Every message of the engine, by channel.

    client ⇄ frontend      DEALER/ROUTER   text or token ids in, deltas out            (docs/protocol.md)
    frontend ⇄ core        DEALER/ROUTER   EngineCoreRequest in, columns out
    core → workers         PUB/SUB         numbered SchedulerOutput, the same to every rank
    workers → core         PUSH/PULL       ModelRunnerOutput of rank 0, errors of every rank
    core ⇄ grammar process DEALER/DEALER   grammars in, masks out
    frontend → intake      stream socket   large bodies and long texts in, token ids out; one at a time
    supervisor ⇄ children  ROUTER/DEALER   start, readiness, progress, stop

Structs are msgpack maps with a `type` tag; token, row and block ids are `bytes`: raw little-endian int32 (codec.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from .errors import ErrorInfo
from .pooling_params import PoolingParams
from .process.log import LogLevel
from .sampling_params import SamplingParams
from .structured_outputs import GrammarKind

PROTOCOL_VERSION = 1

EngineAction: TypeAlias = Literal["pause", "resume", "reload"]
ControlAction: TypeAlias = Literal["pause", "resume", "reload", "log_level"]
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]  # running requests stop and stay, finish first, or end
FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "error"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Root of all messages: `type` names the message, fields at their default are left out."""


# ── client → frontend ────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message after each connect. The identity of a client is its socket's: 16 random bytes."""

    protocol_version: int
    run_id: str = ""  # between the engine's own processes
    fingerprint: str = ""  # likewise


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat, as the chat template sees it."""

    role: str
    content: str


class Child(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the n answers of a request, with the tokens that it already has."""

    index: int = 0
    seed: int = 0
    output_token_ids: bytes = b""


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Ask for answers. Exactly one of prompt, prompt_token_ids and chat is given."""

    request_id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: bytes | None = None
    chat: list[ChatMessage] | None = None
    attempt: int = 0  # a higher one replaces what runs under this id, an equal one is ignored
    children: list[Child] = []  # a resumed request: what was delivered before; empty: a new one
    arrival_time: float = 0.0  # unix seconds of the first submit; 0: now
    num_prompt_logprobs: int = 0  # a resumed request: prompt tokens whose logprobs were delivered
    pooling: PoolingParams | None = None  # embed the prompt instead of going on with it
    add_special_tokens: bool = True  # to the prompt's text, as the checkpoint has them around one
    traceparent: str = ""  # W3C trace context: the span that the request's spans belong to
    tracestate: str = ""  # W3C trace context: what tracing systems keep beside it


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """End a request; answered by its last delta with finish_reason abort, or by nothing if it is unknown."""

    request_id: str


class Credit(Message, frozen=True, kw_only=True, tag="credit"):
    """The client has taken `count` more Deltas messages; the frontend keeps at most CREDIT_WINDOW unanswered."""

    count: int


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Keeps the lease of a client that has open requests."""


class Tokenize(Message, frozen=True, kw_only=True, tag="tokenize"):
    query_id: int
    prompt: str | None = None
    chat: list[ChatMessage] | None = None


class Detokenize(Message, frozen=True, kw_only=True, tag="detokenize"):
    query_id: int
    token_ids: bytes


class GetHealth(Message, frozen=True, kw_only=True, tag="health"):
    query_id: int


class GetInfo(Message, frozen=True, kw_only=True, tag="info"):
    query_id: int


class Control(Message, frozen=True, kw_only=True, tag="control"):
    """Pause, resume, reload weights of the same architecture in place, or log more or less; answered by Done when it is
    so."""

    query_id: int
    action: ControlAction
    mode: PauseMode = "keep"
    model: str = ""  # for reload: folder or hub id
    level: LogLevel = "info"  # for log_level: the least that every process logs


Query: TypeAlias = Tokenize | Detokenize | GetHealth | GetInfo | Control  # each has one Reply of its query_id
ClientMessage: TypeAlias = Hello | Submit | Abort | Credit | Ping | Query

CREDIT_WINDOW = 128  # Deltas messages in flight to one client
LEASE_S = 3.0  # a client with open requests that is silent for longer is taken for dead
PING_INTERVAL_S = 1.0


# ── frontend → client ────────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answers Hello."""

    protocol_version: int
    run_id: str


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Answers a Hello that cannot be served, and a message that broke the protocol."""

    error: ErrorInfo


class Unknown(Message, frozen=True, kw_only=True, tag="unknown"):
    """The peer does not know the sender: it must say Hello and submit again what it holds."""


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """The core holds the request. Until this comes the client submits again after a reconnect."""

    request_id: str
    attempt: int
    prompt_token_ids: bytes
    prompt: str | None  # None: the prompt came as token ids
    seed: int  # given or drawn: what a resubmission must carry


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When things happened, by the frontend's clock in unix seconds; 0 = not yet."""

    arrival_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of m tokens in a row, each with k others: the token itself, then the k likeliest at its place by falling logprob.

    The likeliest have the ranks 1 to k; the token may be among them.
    """

    num_top: int  # k
    token_ids: bytes  # int32 [m, k + 1]
    logprobs: bytes  # float32 [m, k + 1]
    ranks: bytes  # int32 [m]: of the tokens themselves; 1 = likeliest
    texts: dict[int, str] = {}  # of each token id in here by itself; empty without a tokenizer


class BulkArray(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers in bulk: little-endian, in C order."""

    dtype: Literal["float32"]
    shape: list[int]
    data: bytes


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new of one answer: tokens [start, start + n) and the text they add."""

    request_id: str
    index: int = 0  # which of the n answers
    start: int = 0  # output index of the first token here
    token_ids: bytes = b""
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # with the first and the last delta
    error: ErrorInfo | None = None  # with finish_reason error
    logprobs: Logprobs | None = None  # of the tokens here, if asked for
    prompt_logprobs: Logprobs | None = None  # if asked for: of the prompt's tokens from prompt_start on
    prompt_start: int = 0  # the first token of a prompt has none, so the first of these is 1
    embedding: BulkArray | None = None  # of a request with pooling, with its finish; [dimensions]


class Deltas(Message, frozen=True, kw_only=True, tag="deltas"):
    """All that a step brought for one client."""

    deltas: list[Delta]


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    pass


class TokenIds(Message, frozen=True, kw_only=True, tag="token_ids"):
    query_id: int
    token_ids: bytes


class Text(Message, frozen=True, kw_only=True, tag="text"):
    query_id: int
    text: str


class Health(Message, frozen=True, kw_only=True, tag="health_is"):
    """live: this answer; ready: requests are served; stalled: requests are there and no step ends."""

    query_id: int
    is_ready: bool
    is_stalled: bool
    step: int
    step_age_s: float  # since the last finished step
    num_running: int
    num_waiting: int
    num_free_blocks: int = 0  # of the KV pool; as many as Info.num_kv_blocks when no request holds any
    num_recomputed_tokens: int = 0  # computed once more after a preemption or the loss of workers
    num_restarts: int = 0
    last_failure: str = ""
    is_paused: bool = False
    is_draining: bool = False

    @property
    def state(self) -> Literal["stalled", "draining", "paused", "ready", "starting"]:
        """All this in a word, for people."""
        if self.is_stalled:
            return "stalled"
        if self.is_draining:
            return "draining"
        if self.is_paused and self.is_ready:
            return "paused"
        return "ready" if self.is_ready else "starting"


class Info(Message, frozen=True, kw_only=True, tag="info_is"):
    query_id: int
    version: str
    run_id: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    tensor_parallel_size: int
    eos_token_ids: list[int]
    dtype: str = ""
    device: str = ""
    kernels: str = ""  # what computes, for people: "C kernels, AVX2, prebuilt", "plain torch: " and the reason


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Answers Control."""

    query_id: int


class QueryFailed(Message, frozen=True, kw_only=True, tag="query_failed"):
    query_id: int
    error: ErrorInfo


Reply: TypeAlias = TokenIds | Text | Health | Info | Done | QueryFailed
FrontendMessage: TypeAlias = Welcome | Refused | Unknown | Accepted | Deltas | Pong | Reply


# ── frontend → core ──────────────────────────────────────────────────────────────────────────────────────────────────


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


class AbortRequests(Message, frozen=True, kw_only=True, tag="abort_requests"):
    """Free these answers; each is answered by Finished(abort) unless it is unknown or finished already."""

    keys: list[int]


FrontendToCore: TypeAlias = Hello | EngineCoreRequest | AbortRequests | EngineControl | Ping


# ── core → frontend ──────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── core → workers ───────────────────────────────────────────────────────────────────────────────────────────────────


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
    num_logprobs: int = -1  # likeliest tokens beside each sampled one; -1: no logprobs
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
    """Takes the place of a step: every rank drops its rows, reads the weights in `model_folder` and says ControlAck."""

    step: int
    core_epoch: int
    generation: int
    model_folder: str


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """Sent until every rank has answered: PUB drops what is sent before a SUB has joined."""

    core_epoch: int
    generation: int


CoreToWorker: TypeAlias = SchedulerOutput | TokenMask | ReloadWeights | Probe


# ── workers → core ───────────────────────────────────────────────────────────────────────────────────────────────────


class ProbeAck(Message, frozen=True, kw_only=True, tag="probe_ack"):
    rank: int
    core_epoch: int
    generation: int


class ControlAck(Message, frozen=True, kw_only=True, tag="control_ack"):
    rank: int
    step: int
    core_epoch: int
    generation: int


class ModelRunnerOutput(Message, frozen=True, kw_only=True, tag="result"):
    """What rank 0 sampled in a step: rows in the order of the SchedulerOutput, those that did not sample left out."""

    step: int
    core_epoch: int
    generation: int
    rows: bytes  # int32
    counts: bytes  # int32: tokens per row (1; more with speculation)
    token_ids: bytes  # int32, flat
    execute_s: float = 0.0  # seconds that the step took on this rank
    logprobs: LogprobColumns | None = None  # of sampled tokens, for rows that asked; positions are not filled in
    prompt_logprobs: LogprobColumns | None = None
    barred_rows: bytes = b""  # int32: their rules leave no token; what stands for them in token_ids is void
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


# ── core → grammar process ───────────────────────────────────────────────────────────────────────────────────────────


class OpenGrammar(Message, frozen=True, kw_only=True, tag="open_grammar"):
    """Compile a grammar and take it past the tokens that the answer already has; answered by GrammarOpened."""

    grammar_id: int  # the core's number for one answer's place in its grammar
    kind: GrammarKind
    text: str
    token_ids: bytes = b""  # int32: output tokens so far


class CloseGrammars(Message, frozen=True, kw_only=True, tag="close_grammars"):
    grammar_ids: list[int]


class AdvanceGrammars(Message, frozen=True, kw_only=True, tag="advance_grammars"):
    """Take in one token each, then make the masks of `mask_ids`; answered by GrammarsAdvanced."""

    grammar_ids: bytes  # int32 [n]
    token_ids: bytes  # int32 [n]
    serial: int  # comes back with the answer
    mask_ids: bytes = b""  # int32 [m]


CoreToGrammar: TypeAlias = OpenGrammar | CloseGrammars | AdvanceGrammars


# ── grammar process → core ───────────────────────────────────────────────────────────────────────────────────────────


class GrammarOpened(Message, frozen=True, kw_only=True, tag="grammar_opened"):
    grammar_id: int
    is_complete: bool = False  # the tokens it has are all that it can have
    error: ErrorInfo | None = None


class GrammarFailure(msgspec.Struct, frozen=True):
    grammar_id: int
    error: ErrorInfo


class GrammarsAdvanced(Message, frozen=True, kw_only=True, tag="grammars_advanced"):
    """Masks in the order asked for; complete and failed grammars have none."""

    serial: int
    mask_ids: bytes = b""  # int32 [m]
    bits: bytes = b""  # uint32 [m, ceil(vocab_size / 32)], as in TokenMask
    forced_counts: bytes = b""  # int32 [m]: tokens that must follow, of which the mask leaves the first; 0: a choice
    forced_ids: bytes = b""  # int32, flat: sum(forced_counts)
    complete_ids: bytes = b""  # int32: nothing can follow the tokens taken in
    failures: list[GrammarFailure] = []


GrammarToCore: TypeAlias = GrammarOpened | GrammarsAdvanced


# ── frontend → intake process, and back ──────────────────────────────────────────────────────────────────────────────


class ReadBody(Message, frozen=True, kw_only=True, tag="read_body"):
    """Decode and check an HTTP body, whose bytes follow, and tokenize what is long of it."""

    body_type: str  # name of the struct that it is decoded as
    max_bytes_per_token: int | None  # as in PromptLimits


class ReadPrompt(Message, frozen=True, kw_only=True, tag="read_prompt"):
    """Tokenize a long prompt. Exactly one of prompt and chat is given."""

    prompt: str | None = None
    chat: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    may_be_long: bool = False  # beyond max_model_len, since its beginning is to be cut off
    max_bytes_per_token: int | None = None  # as in PromptLimits


IntakeQuestion: TypeAlias = ReadBody | ReadPrompt


class BodyInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt of an HTTP body, or the tokens to detokenize: text, token ids, or a text with its token ids."""

    text: str | None = None
    token_ids: bytes | None = None
    is_of_chat: bool = False
    is_inside_thought: bool = False  # of a chat's: its text ends inside a <think> block


class BodyRead(Message, frozen=True, kw_only=True, tag="body_read"):
    """Answers ReadBody."""

    rest: bytes  # JSON: the body without its inputs
    inputs: list[BodyInput]  # in their order; of a chat, its prompt


class PromptRead(Message, frozen=True, kw_only=True, tag="prompt_read"):
    """Answers ReadPrompt."""

    token_ids: bytes


class NotRead(Message, frozen=True, kw_only=True, tag="not_read"):
    """Answers either: the caller's body or text is at fault."""

    message: str
    status: int = 400  # of the HTTP answer
    param: str | None = None  # the field that it is about; None: the message begins with it, if any
    code: str | None = None


IntakeAnswer: TypeAlias = BodyRead | PromptRead | NotRead


# ── supervisor ⇄ children ────────────────────────────────────────────────────────────────────────────────────────────


class Phase(Message, frozen=True, kw_only=True, tag="phase"):
    """A start-up phase is over; printed by the supervisor."""

    name: str
    duration_s: float
    detail: str = ""


class PhaseProgress(Message, frozen=True, kw_only=True, tag="phase_progress"):
    """How far a start-up phase that takes long has come, every few seconds; printed by the supervisor."""

    name: str
    num_done: int
    num_all: int
    unit: str  # of both, in the plural


class Measured(Message, frozen=True, kw_only=True, tag="measured"):
    """How many KV blocks this rank has room for, and what computes."""

    max_blocks: int
    block_bytes: int
    device: str
    kernels: str = ""  # for people: "C kernels, AVX2, prebuilt", "plain torch: " and the reason


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    pass


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The child cannot start or go on, in one line; it exits after this."""

    error: ErrorInfo


class SetLogLevel(Message, frozen=True, kw_only=True, tag="set_log_level"):
    """From a frontend, for a client: every process shall log what is at least this bad. The supervisor keeps it for
    processes that it starts later, and says the same to all children."""

    level: LogLevel


class Drained(Message, frozen=True, kw_only=True, tag="drained"):
    """Answers Drain: every client has been sent all that it asked for."""


class ReplaceWorkers(Message, frozen=True, kw_only=True, tag="replace_workers"):
    """The core cannot go on with this worker group."""

    generation: int
    reason: str


class Reloading(Message, frozen=True, kw_only=True, tag="reloading"):
    """To the supervisor: the workers shall read other weights. It notes that their weights are uncertain and says the
    same back; only then do they get the order."""

    generation: int
    model_folder: str


class Reloaded(Message, frozen=True, kw_only=True, tag="reloaded"):
    """To the supervisor: all ranks have read them. It notes that new workers read them too and says the same back;
    only then is the client answered."""

    generation: int


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """The core's state, passed on to the frontends."""

    step: int
    step_age_s: float
    num_running: int
    num_waiting: int
    num_free_blocks: int = 0
    kv_map: bytes = b""  # of some blocks of the pool, evenly spread: 0 empty, 1 cached, 2 used, 3 shared
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0  # this and what follows: totals since this core's start, for the metrics
    num_queried_tokens: int = 0  # looked up in the prefix cache
    num_hit_tokens: int = 0
    num_scheduled_tokens: int = 0
    schedule_s: float = 0.0
    send_s: float = 0.0
    execute_s: float = 0.0
    host_s: float = 0.0  # taking results in
    num_rows_in_steps: int = 0
    num_steps_by_rows: list[int] = []  # of at most 1, 2, 4, 8 … 4096 rows and more than the one before; larger ones
    num_steps_in_flight: int = 0
    num_restarts: int = 0  # this and what follows: the supervisor's
    num_http_requests_cut: int = 0  # which lost frontends left without the end of their answer
    worker_memory_bytes: list[int] = []  # resident, by rank
    last_failure: str = ""
    is_core_up: bool = True
    is_paused: bool = False


ChildToSupervisor: TypeAlias = (
    Hello
    | Phase
    | PhaseProgress
    | Measured
    | Ready
    | Failed
    | Drained
    | ReplaceWorkers
    | Reloading
    | Reloaded
    | SetLogLevel
    | Progress
    | Pong
)


class Initialize(Message, frozen=True, kw_only=True, tag="initialize"):
    """The pool's size, the least of all ranks."""

    num_blocks: int


class StartPhase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A Phase of one of the processes that live now."""

    process: str
    name: str
    ended_s: float  # since the engine's start
    duration_s: float
    detail: str = ""


class StartPhases(Message, frozen=True, kw_only=True, tag="start_phases"):
    """To frontends: how all processes that live now have started, in the order in which it happened."""

    phases: list[StartPhase]
    kernels: str = ""  # of Measured, each that a rank named once


class WorkersUp(Message, frozen=True, kw_only=True, tag="workers_up"):
    """A new worker group has loaded and listens on the addresses of its generation."""

    generation: int


class WorkersDown(Message, frozen=True, kw_only=True, tag="workers_down"):
    """The group has ended; another is being started."""

    generation: int
    reason: str


class CoreUp(Message, frozen=True, kw_only=True, tag="core_up"):
    """To frontends: a new core is there and knows nothing; say Hello and submit again."""

    core_epoch: int


class FrontendDown(Message, frozen=True, kw_only=True, tag="frontend_down"):
    """To the core: this frontend has ended; its clients will submit again through the next."""

    identity: bytes


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """To frontends: refuse new requests and finish those that are open; answered by Drained."""

    clients_return_s: float = 0.0  # a frontend was lost: for so long its clients may come with what it had open


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Exit now."""

    reason: str = ""  # what ended the engine, if nobody asked for it


SupervisorToChild: TypeAlias = (
    Initialize
    | StartPhases
    | WorkersUp
    | WorkersDown
    | Reloading
    | Reloaded
    | CoreUp
    | FrontendDown
    | SetLogLevel
    | Drain
    | Stop
    | Progress
    | Ping
)
