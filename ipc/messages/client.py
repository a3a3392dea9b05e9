"""Messages between clients and frontends, over DEALER/ROUTER (docs/reference/protocol.md).

Clients send Submit, Abort, Credit, PutMedium and queries; frontends reply with Accepted, Deltas and one reply per
query."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ..codec import JsonObject
from ..errors import ErrorInfo
from ..params.pooling_params import PoolingParams, PoolingTask
from ..params.sampling_params import SamplingParams
from ..process.log import LogLevel
from .adapter import AdapterInfo
from .base import (
    BulkArray,
    CacheReport,
    FinishReason,
    Hello,
    MemoryTag,
    Message,
    OrderAction,
    PauseMode,
    Ping,
    Pong,
    Refused,
    Unknown,
    Welcome,
)
from .media import MediaKind
from .metrics import Metric
from .tier import PlaceName

ControlAction: TypeAlias = OrderAction | Literal["prefetch_kv"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text of a message."""

    text: str


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    """Place of a medium in a message."""

    index: int  # in the media of the request


ContentPart: TypeAlias = TextPart | MediaPart


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a chat, as passed to the chat template."""

    role: str
    content: str | list[ContentPart] | None  # nil: the message has only calls
    more: JsonObject = {}  # further fields for the template: name, reasoning_content, tool_calls, tool_call_id …

    @property
    def parts(self) -> list[ContentPart]:
        """The content as parts."""
        return [TextPart(self.content)] if isinstance(self.content, str) else self.content or []

    @property
    def text(self) -> str:
        """The texts of the content, joined with line breaks."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or () if isinstance(part, TextPart))


class ChatForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options for rendering a chat as a prompt."""

    template: str | None = None  # Jinja, instead of the model's own
    variables: JsonObject = {}  # of the template: tools, documents, add_generation_prompt and others
    add_special_tokens: bool = False  # add the tokenizer's special tokens to those that the template writes
    is_continued: bool = False  # the answer continues the last message, which the prompt leaves open
    answer: str = ""  # start of the answer, at the end of the prompt


class ChatField(msgspec.Struct, frozen=True, array_like=True):
    """A field from which a chat was rendered, without its value."""

    name: str  # messages[0].content, tools[3] …
    role: str  # of the message; "tools" for a tool; empty for variables of the template
    digest: bytes
    masked: bytes  # digest of the value without the characters of times, numbers and ids


class Child(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the n answers of a request, with its tokens so far."""

    index: int = 0
    seed: int = 0
    output_token_ids: bytes = b""
    finish_reason: FinishReason | None = None  # of an answer that has ended: it is not generated any further


class Medium(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A medium of a request: bytes that the engine has or receives by PutMedium, or a URL that it fetches."""

    kind: MediaKind = "image"
    digest: bytes = b""  # SHA-256 of the bytes; empty: any bytes at `url`, or those that had this `uuid` before
    url: str = ""
    uuid: str = ""  # the caller's name for the bytes, with which later requests may refer to them
    detail: Literal["", "auto", "low", "high"] = ""  # how large an image is shown to the model


def with_digests(media: list[Medium], digests: list[bytes]) -> list[Medium]:
    """Return media that stand for the bytes with these digests, though their URLs or uuids may lead to others by now.
    There are no digests if the media were not read."""
    if len(digests) != len(media):
        return media
    return [
        medium if medium.digest else msgspec.structs.replace(medium, digest=digest)
        for medium, digest in zip(media, digests, strict=True)
    ]


class PutMedium(Message, frozen=True, kw_only=True, tag="put_medium"):
    """The bytes of a medium, sent before the Submit that has their digest. No reply."""

    digest: bytes
    data: memoryview  # decoded without a copy: it keeps the whole frame in memory


class ThoughtTexts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The texts around the thoughts of an answer."""

    opening: str = ""  # empty: answers begin inside
    closing: str = ""  # empty: answers have no thoughts
    begins_inside: bool = False  # answers begin inside a thought, though no prompt opens it


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Request for answers. Exactly one of prompt, prompt_token_ids and chat is set."""

    request_id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: bytes | None = None
    chat: list[ChatMessage] | None = None
    chat_form: ChatForm | None = None  # for `chat`; nil: the model's own form
    attempt: int = 0  # a higher attempt replaces the running request of this id, an equal one is ignored
    children: list[Child] = []  # for a resumed request: the tokens already delivered; empty for a new one
    arrival_time: float = 0.0  # unix seconds of the first submit; 0: now
    waited_s: float | None = None  # for a resumed request, instead of arrival_time: seconds since the first submit
    has_echo: bool = False  # for a resumed request: its tokens come again, first, in one delta for each
    num_prompt_logprobs: int = 0  # for a resumed request: prompt tokens with delivered logprobs
    pooling: PoolingParams | None = None  # make a vector or scores of the prompt instead of generating
    add_special_tokens: bool = True  # add the tokenizer's special tokens to `prompt`
    traceparent: str = ""  # W3C trace context: parent of the request's spans
    tracestate: str = ""  # W3C trace context: data of tracing systems
    adapter: str = ""  # name of a LoRA adapter; empty, or a name of the served model: the model alone
    adapter_path: str = ""  # folder on the engine's machine to load it from, if no adapter has this name yet
    adapter_digest: bytes = b""  # for a resumed request: from Accepted; the name may have other weights by now
    shown_token_ids: bytes = b""  # special tokens that are part of the text in any case: a parser's markers
    media: list[Medium] = []  # in the order of their placeholders in the prompt; parts of `chat` name them by index
    text_pair: str | None = None  # with pooling: the second text of a pair, of which `prompt` is the first
    chat_fields: list[ChatField] = []  # of a chat from which the prompt was rendered, for the cache report
    thoughts: ThoughtTexts | None = None  # of a prompt that another template made; nil: those of the model's answers


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Order to end a request. Its last delta has finish_reason abort; an unknown request gets no reply."""

    request_id: str


class Credit(Message, frozen=True, kw_only=True, tag="credit"):
    """Flow control: the client has received `count` more Deltas messages; at most CREDIT_WINDOW are in flight."""

    count: int


class Tokenize(Message, frozen=True, kw_only=True, tag="tokenize"):
    query_id: int
    prompt: str | None = None
    chat: list[ChatMessage] | None = None
    add_special_tokens: bool = True  # add the tokenizer's special tokens to `prompt`


class Detokenize(Message, frozen=True, kw_only=True, tag="detokenize"):
    query_id: int
    token_ids: bytes


class GetHealth(Message, frozen=True, kw_only=True, tag="health"):
    query_id: int


class GetInfo(Message, frozen=True, kw_only=True, tag="info"):
    query_id: int


class GetAnswerForm(Message, frozen=True, kw_only=True, tag="answer_form"):
    """Question how answers are written. It is answered once the form is learned."""

    query_id: int
    template: str | None = None  # the chat template of requests; nil: the model's


class GetMetrics(Message, frozen=True, kw_only=True, tag="get_metrics"):
    query_id: int


class Control(Message, frozen=True, kw_only=True, tag="control"):
    """Order to pause, resume, reload weights, sleep, wake up, clear caches, load KV blocks, profile, set the log level
    or restart replicas.
    The reply is Done, after the action is complete."""

    query_id: int
    action: ControlAction
    mode: PauseMode = "keep"  # for pause and sleep
    model: str = ""  # for reload: folder or hub id of weights of the same architecture
    sleep_level: int = 1  # 1: keep the checkpoint in the machine's page cache; 2: drop it there too
    tags: list[MemoryTag] | None = None  # for wake_up: the memory to restore; nil: all
    prompt: str | None = None  # for prefetch_kv: either this or prompt_token_ids
    prompt_token_ids: bytes | None = None
    cache_salt: str | None = None  # for prefetch_kv: as in SamplingParams
    adapter: str = ""  # for prefetch_kv: as in Submit
    media: list[Medium] = []  # for prefetch_kv: as in Submit
    level: LogLevel = "info"  # for log_level: the lowest level that processes log
    replica: int | None = None  # for restart_replicas: its number; nil: all, one after the other
    order_id: str = ""  # random; an order that is sent again, since its reply was lost, is carried out once


class LoadAdapter(Message, frozen=True, kw_only=True, tag="load_adapter"):
    """Order to load a LoRA adapter. The reply is Done, when requests may name it."""

    query_id: int
    name: str
    path: str  # folder on the engine's machine
    is_inplace: bool = False  # later requests use it in place of the adapter that has the name
    order_id: str = ""  # as in Control


class UnloadAdapter(Message, frozen=True, kw_only=True, tag="unload_adapter"):
    """Order to forget the name of an adapter. Open requests keep the adapter. The reply is Done."""

    query_id: int
    name: str
    order_id: str = ""  # as in Control


class ListAdapters(Message, frozen=True, kw_only=True, tag="list_adapters"):
    query_id: int


AdapterQuery: TypeAlias = LoadAdapter | UnloadAdapter | ListAdapters
Query: TypeAlias = (  # one Reply each
    Tokenize | Detokenize | GetHealth | GetInfo | GetAnswerForm | GetMetrics | Control | AdapterQuery
)
ClientMessage: TypeAlias = Hello | PutMedium | Submit | Abort | Credit | Ping | Query
CREDIT_WINDOW = 128  # Deltas messages in flight to one client


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """Reply to Submit: the core has the request, or it has ended already. Until this reply, a reconnect resubmits
    it."""

    request_id: str
    attempt: int
    prompt_token_ids: bytes
    prompt: str | None  # None: the prompt was given as token ids
    seed: int  # given or drawn; a resubmission must repeat it
    adapter_digest: bytes = b""  # digest of the adapter with this name; a resubmission must repeat it
    begins_in_thought: bool = False  # the prompt of the chat opens a thought
    media_digests: list[bytes] = []  # SHA-256 of the bytes of each medium; a resubmission must repeat them


class NeedMedia(Message, frozen=True, kw_only=True, tag="need_media"):
    """Reply to Submit: the engine lacks the bytes of these media. The request waits for their PutMedium."""

    request_id: str
    attempt: int
    digests: list[bytes]


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times of a request by the frontend's clock in unix seconds, 0 = not yet, and counts."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0  # of the first step that computed a part of the request
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0
    num_drafts: int = 0  # guessed tokens that were verified
    num_accepted_drafts: int = 0  # of num_drafts: those that were right
    num_loaded_tokens: dict[PlaceName, int] = {}  # of num_cached_tokens: those from host, disk, remote or peer


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Logprobs at m consecutive positions, k + 1 at each: that of the token itself, then those of k alternatives.

    The alternatives are the k likeliest by falling logprob (ranks 1 to k; the token itself may be among them), or
    the tokens of logprob_token_ids, without ranks.
    """

    num_top: int  # k
    token_ids: bytes  # int32 [m, k + 1]
    logprobs: bytes  # float32 [m, k + 1]
    ranks: bytes  # int32 [m]: ranks of the tokens themselves; 1 = likeliest
    texts: dict[int, str] = {}  # text of each token id by itself; empty without a tokenizer
    are_named: bool = False  # the alternatives are the tokens of logprob_token_ids, in that order


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New output of one answer: tokens [start, start + n) and the text that they complete."""

    request_id: str
    index: int = 0  # number of the answer among the request's n
    start: int = 0  # output index of the first of token_ids
    token_ids: bytes = b""
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the answer
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # in the first and the last delta of the answer
    error: ErrorInfo | None = None  # with finish_reason error
    logprobs: Logprobs | None = None  # of token_ids, if requested
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens from prompt_start on, if requested
    prompt_start: int = 0  # at least 1: the first prompt token has no logprob
    embedding: BulkArray | None = None  # in the last delta of a request with pooling, its result: [outputs], or
    # [tokens, outputs] for a task by tokens
    cache_report: CacheReport | None = None  # in the last delta, if tokens of the prompt had been computed before


class Deltas(Message, frozen=True, kw_only=True, tag="deltas"):
    """New output for one client: that of one step, or of all steps while the client had no credit."""

    deltas: list[Delta]


class TokenIds(Message, frozen=True, kw_only=True, tag="token_ids"):
    query_id: int
    token_ids: bytes


class Text(Message, frozen=True, kw_only=True, tag="text"):
    query_id: int
    text: str


class Health(Message, frozen=True, kw_only=True, tag="health_is"):
    """Reply to GetHealth. is_ready: new requests are accepted; they wait while is_paused or is_asleep. is_stalled:
    there are requests, is_paused and is_asleep are false, no host is missing, but no step finishes."""

    query_id: int
    is_ready: bool
    is_stalled: bool
    step: int
    step_age_s: float  # since the last finished step
    num_running: int
    num_waiting: int
    num_free_blocks: int = 0  # of the KV pool; equals Info.num_kv_blocks if no request uses any
    num_recomputed_tokens: int = 0  # computed again after a preemption or the loss of workers
    num_restarts: int = 0
    last_failure: str = ""
    is_paused: bool = False
    is_draining: bool = False
    is_asleep: bool = False  # weights or KV pool are freed, and requests wait

    @property
    def state(self) -> Literal["stalled", "draining", "asleep", "paused", "ready", "starting"]:
        """The state in one word, for users."""
        if self.is_stalled:
            return "stalled"
        if self.is_draining:
            return "draining"
        if self.is_asleep and self.is_ready:
            return "asleep"
        if self.is_paused and self.is_ready:
            return "paused"
        return "ready" if self.is_ready else "starting"


class SpeechModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a speech model that a client needs to ask for transcripts."""

    family: str
    piece_s: float  # seconds of the longest piece of a clip
    language_ids: dict[str, int] | None = None  # tokens that name a language, by its code; {}: only English
    has_times: bool = False  # transcripts have the times of segments
    max_context_tokens: int = 0  # longest text before the prompt, in tokens


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
    kernels: str = ""  # for users: "C kernels, AVX2, prebuilt", or "plain torch: " and the reason
    default_sampling_params: dict[str, int | float] = {}  # for fields of SamplingParams that a request leaves out
    tokenizer_folder: str = ""  # on the engine's machine; empty: none
    chat_template: str = ""  # Jinja; empty: none
    max_loras: int = 0  # adapters in one batch; 0: the engine serves none
    modalities: list[MediaKind] = []  # kinds of media that prompts may have; empty: only text
    max_media: dict[MediaKind, int] = {}  # media of a kind in one prompt; a kind that is missing: as many as fit
    max_media_bytes: int = 0  # of one medium
    has_answer_rules: bool = False  # the tokens that may be sampled depend on the position in the answer
    pooling_tasks: list[PoolingTask] = []  # tasks of requests with pooling that the model serves, its own first
    speech: SpeechModel | None = None  # None: the model transcribes no speech


class AnswerFormIs(Message, frozen=True, kw_only=True, tag="answer_form_is"):
    """Reply to GetAnswerForm."""

    query_id: int
    form: JsonObject  # AnswerForm (frontend/forms/answer_forms/form.py)
    call_token: str = ""  # the token with which calls begin; empty: they begin with text
    marker_ids: bytes = b""  # the special tokens among the form's markers, for Submit.shown_token_ids


class Metrics(Message, frozen=True, kw_only=True, tag="metrics_are"):
    query_id: int
    metrics: list[Metric]


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Reply to Control, LoadAdapter and UnloadAdapter, when the action is complete."""

    query_id: int
    num_tokens: int = 0  # for prefetch_kv: number of the prompt's first tokens that need not be computed now


class Adapters(Message, frozen=True, kw_only=True, tag="adapters_are"):
    """Reply to ListAdapters: the adapters that requests may name, sorted by name."""

    query_id: int
    adapters: list[AdapterInfo]


class QueryFailed(Message, frozen=True, kw_only=True, tag="query_failed"):
    query_id: int
    error: ErrorInfo


Reply: TypeAlias = TokenIds | Text | Health | Info | AnswerFormIs | Metrics | Adapters | Done | QueryFailed
FrontendMessage: TypeAlias = Welcome | Refused | Unknown | Accepted | NeedMedia | Deltas | Pong | Reply
