"""client ⇄ frontend, DEALER/ROUTER: text or token ids in, deltas out (docs/protocol.md)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..codec import JsonObject
from ..errors import ErrorInfo
from ..pooling_params import PoolingParams
from ..process.log import LogLevel
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
from .metrics import Metric

ControlAction: TypeAlias = EngineAction | Literal["log_level"]
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]  # running requests stop and stay, finish first, or end


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat, as the chat template sees it."""

    role: str
    content: str
    more: JsonObject = {}  # what else the template gets of it: name, reasoning_content, tool_calls, tool_call_id …


class ChatForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the turns of a chat become a prompt."""

    template: str | None = None  # Jinja, in place of the model's own
    variables: JsonObject = {}  # that it may use: tools, documents, add_generation_prompt and whatever else it knows
    add_special_tokens: bool = False  # which the checkpoint puts around texts, beside those that the template writes
    is_continued: bool = False  # the answer goes on with the text of the last turn, which nothing follows then


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
    chat_form: ChatForm | None = None  # of `chat`; nil: the model's own
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


class GetMetrics(Message, frozen=True, kw_only=True, tag="get_metrics"):
    query_id: int


class Control(Message, frozen=True, kw_only=True, tag="control"):
    """Pause, resume, reload weights of the same architecture in place, give memory back and take it again, empty the
    prefix cache, record traces of the workers, or log more or less; answered by Done when it is so."""

    query_id: int
    action: ControlAction
    mode: PauseMode = "keep"  # for pause and sleep
    model: str = ""  # for reload: folder or hub id
    sleep_level: int = 1  # 1: the checkpoint stays in the machine's page cache; 2: it leaves that, too
    tags: list[MemoryTag] | None = None  # for wake_up: what shall be there again; nil: all
    level: LogLevel = "info"  # for log_level: the least that every process logs


Query: TypeAlias = Tokenize | Detokenize | GetHealth | GetInfo | GetMetrics | Control  # each has one Reply
ClientMessage: TypeAlias = Hello | Submit | Abort | Credit | Ping | Query
CREDIT_WINDOW = 128  # Deltas messages in flight to one client


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
    first_scheduled_time: float = 0.0  # of the first step that computed some of it
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of m tokens in a row, each with k others: the token itself, then the k likeliest at its place by falling logprob.

    The likeliest have the ranks 1 to k; the token may be among them. Others that were named have no ranks.
    """

    num_top: int  # k
    token_ids: bytes  # int32 [m, k + 1]
    logprobs: bytes  # float32 [m, k + 1]
    ranks: bytes  # int32 [m]: of the tokens themselves; 1 = likeliest
    texts: dict[int, str] = {}  # of each token id in here by itself; empty without a tokenizer
    are_named: bool = False  # the others are those of logprob_token_ids, in that order


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
    is_asleep: bool = False  # weights or KV pool have been given back: requests wait

    @property
    def state(self) -> Literal["stalled", "draining", "asleep", "paused", "ready", "starting"]:
        """All this in a word, for people."""
        if self.is_stalled:
            return "stalled"
        if self.is_draining:
            return "draining"
        if self.is_asleep and self.is_ready:
            return "asleep"
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
    default_sampling_params: dict[str, int | float] = {}  # of requests that say nothing, by names of SamplingParams
    tokenizer_folder: str = ""  # on the engine's machine; empty: none
    chat_template: str = ""  # Jinja; empty: none


class Metrics(Message, frozen=True, kw_only=True, tag="metrics_are"):
    query_id: int
    metrics: list[Metric]


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Answers Control."""

    query_id: int


class QueryFailed(Message, frozen=True, kw_only=True, tag="query_failed"):
    query_id: int
    error: ErrorInfo


Reply: TypeAlias = TokenIds | Text | Health | Info | Metrics | Done | QueryFailed
FrontendMessage: TypeAlias = Welcome | Refused | Unknown | Accepted | Deltas | Pong | Reply
