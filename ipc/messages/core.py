"""Messages between frontends (or a gateway's frontends) and the core, over DEALER/ROUTER.

Frontends send EngineCoreRequest, AbortRequests and Prefetch. The core sends EngineCoreOutputs (columns: arrays with an
element for each entry), Prefetched and Load. Gateways have no supervisor next to the core, so they also send Order to
the core, and get Ordered, Progress, ReplicaDown, WorkersUp, WeightsChanged and requests for blobs from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, Self, TypeAlias

import msgspec

from ..codec import decode_ids
from ..errors import ErrorInfo
from ..params.pooling_params import PoolingParams
from ..params.sampling_params import SamplingParams
from .adapter import AdapterRef
from .base import (
    BulkArray,
    CacheMisses,
    FinishReason,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Unknown,
    Welcome,
)
from .blobs import BlobChunk, GetBlob, NoBlob
from .media import MediaSpan
from .orders import Order, Ordered
from .supervisor import Progress, ReplicaDown, WorkersUp
from .tier import PlaceName


class ModelDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties in which two engines must agree to give the same answers. `difference` has the exceptions."""

    weights: str  # digest of the checkpoint; empty: unknown, as in a gateway that has only config and tokenizer
    model: str  # digest of the shape, quantization included
    tokenizer: str  # digest of its files
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    media: str = ""  # digest of the encoder's shape and of the largest medium; empty: only text
    max_lora_rank: int = 0  # 0: no adapters
    lora_targets: str = ""  # modules that adapters may change, with commas between; empty: all, or no adapters

    @property
    def text(self) -> str:
        """A digest of all fields, in hex; empty while the weights are unknown."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest() if self.weights else ""

    def difference(self, other: ModelDigest) -> str:
        """Return the first field in which an engine, `other`, differs from its gateway, with both values; "" if there
        is none. Unknown weights count as equal; an engine may serve media and adapters that the gateway does not
        serve."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            is_unknown = name == "weights" and "" in (mine, theirs)
            if mine != theirs and not is_unknown and self._uses(name):
                return f"its {name} is {theirs or 'none'!s:.16}, not {mine or 'all'!s:.16}"
        return ""

    def with_weights(self, weights: str) -> Self:
        return msgspec.structs.replace(self, weights=weights)

    def _uses(self, name: str) -> bool:
        """Return whether the field `name` matters to a gateway with this digest."""
        if name == "media":
            return bool(self.media)
        return bool(self.max_lora_rank) or name not in ("max_lora_rank", "lora_targets")


class GatewayHello(Message, frozen=True, kw_only=True, tag="gateway_hello"):
    """First message of a gateway's frontend after each connect. The reply is GatewayWelcome or Refused."""

    protocol_version: int
    model: ModelDigest


class GatewayWelcome(Message, frozen=True, kw_only=True, tag="gateway_welcome"):
    """Reply to a GatewayHello with an equal model: the core has no requests of this frontend."""

    model: ModelDigest
    num_blocks: int  # blocks of the KV pool, the null block included
    max_model_len: int  # the longest request that model and pool allow


class WeightsChanged(Message, frozen=True, kw_only=True, tag="weights_changed"):
    """Notice to gateways that a core has reloaded."""

    weights: str  # as in ModelDigest, from now on
    model_folder: str  # on the engine's machine


class CoreChild(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer to generate: `key` is the frontend's number for it, unique on its connection, in [0, 2^31)."""

    key: int
    seed: int
    output_token_ids: bytes = b""


class ConstraintBegin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output tokens at which the constraint of an answer begins: the end of a thought, or the start of calls."""

    token_ids: bytes  # int32, at least one
    is_included: bool = False  # they are the first tokens of the constrained text; else it follows them

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) % 4:
            raise ValueError(f"a begin has {len(self.token_ids)} bytes, which make no tokens")

    @property
    def last_id(self) -> int:
        return decode_ids(self.token_ids)[-1]


class TenantRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The API key that a request came with, by its name, and its part of the engine."""

    name: str
    weight: float = 1.0  # above 0: its part of the engine is in proportion to it
    kv_share: float = 1.0  # largest part of the KV pool that its running requests hold while others are open


class EngineCoreRequest(Message, frozen=True, kw_only=True, tag="request"):
    """A validated request: everything that a core needs to start or resume it."""

    children: list[CoreChild]
    prompt_token_ids: bytes
    params: SamplingParams
    max_tokens: int  # resolved against max_model_len
    stop_token_ids: list[int]  # includes the model's end tokens, unless ignored
    arrival_time: float  # unix seconds by the sender's clock; decides the place in the queue
    waited_s: float | None = None  # seconds from arrival to sending, for the deadlines; nil: use arrival_time
    pooling: PoolingParams | None = None  # for kind pool
    attempt: int = 0
    bad_words: list[bytes] = []  # int32: the tokens of each
    logits_processors: list[int] = []  # indices into --allowed-logits-processors
    thought_markers: list[bytes] = []  # int32: tokens that start reasoning, none: it starts at once, and that end it
    constraint_begins: list[ConstraintBegin] = []  # the grammar applies from each of them on; empty: from the start
    constraint_triggers: bytes = b""  # int32: each alone is a begin, included; behind one of constraint_begins, if any
    constraint_repeats: bool = False  # text after the grammar's end is free up to the next begin; else the answer ends
    num_losses: int = 0  # cores and worker groups lost while they computed it, since its last new token
    num_prompt_logprobs: int = 0  # prompt tokens with delivered logprobs; the first, which has none, counts
    adapter: AdapterRef | None = None  # None: the base model
    media: list[MediaSpan] = []  # by rising starts
    caller: str = ""  # identifies the caller, since callers get equal shares of the grammar compilers
    tenant: TenantRef | None = None  # None: it came without a key that has a name

    @property
    def kind(self) -> Literal["generate", "pool"]:
        """The kind of result: generate: tokens after the prompt; pool: a vector, or a matrix for its tokens."""
        return "generate" if self.pooling is None else "pool"


class Prefetch(Message, frozen=True, kw_only=True, tag="prefetch"):
    """Order to load the KV blocks of a prompt. The reply is Prefetched."""

    prefetch_id: int
    prompt_token_ids: bytes
    cache_salt: str | None = None
    adapter_digest: bytes = b""  # empty: the base model
    media: list[MediaSpan] = []  # by rising starts


class AbortRequests(Message, frozen=True, kw_only=True, tag="abort_requests"):
    """Order to end the answers with these keys. Each gets Finished(abort), unless it is unknown or has finished."""

    keys: list[int]


FrontendToCore: TypeAlias = (
    Hello
    | GatewayHello
    | EngineCoreRequest
    | AbortRequests
    | Prefetch
    | Ping
    | Order  # this and the following are of gateways, which have no supervisor next to the core
    | BlobChunk  # a reply to GetBlob
    | NoBlob
)


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    key: int
    reason: FinishReason
    num_preemptions: int = 0
    num_drafts: int = 0  # guessed tokens that were verified
    num_accepted_drafts: int = 0
    error: ErrorInfo | None = None
    vector: BulkArray | None = None  # result of a request of kind pool


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Notice that an answer left the waiting queue for the first time."""

    key: int
    num_cached_tokens: int = 0
    num_loaded_tokens: dict[PlaceName, int] = {}  # of num_cached_tokens: those from places outside the pool


class Missed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Notice that tokens of an answer's prompt were computed before and not found in the prefix cache."""

    key: int
    misses: CacheMisses


class LogprobColumns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Logprobs of n tokens of any requests: for each token its own, then those of alternatives, as in Logprobs
    (client.py).

    Logprobs have four forms on their way: a worker sends RowLogprobs, the core forwards them as KeyLogprobs, the
    frontend collects those of an answer in a LogprobBuffer and sends Logprobs, and the client's outputs have
    TokenLogprobs (or FlatLogprobs).
    """

    widths: bytes = b""  # int32 [n]: 1 + number of alternatives
    ranks: bytes = b""  # int32 [n]: rank of the token itself; 1 = likeliest
    token_ids: bytes = b""  # int32, flat: sum(widths)
    logprobs: bytes = b""  # float32, flat

    @classmethod
    def join(cls, parts: Iterable[Self | None]) -> Self | None:
        """Return the concatenation of `parts`, without those that are None; None if all are."""
        present = [part for part in parts if part is not None]
        if len(present) <= 1:
            return present[0] if present else None
        return cls(**{name: b"".join(getattr(part, name) for part in present) for name in cls.__struct_fields__})


class KeyLogprobs(LogprobColumns, frozen=True, kw_only=True, omit_defaults=True):
    """Logprobs of answers, identified by their keys."""

    keys: bytes = b""  # int32 [n]
    positions: bytes = b""  # int32 [n]: index of the token in the output, or in the prompt


class EngineCoreOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="outputs"):
    """New output of one turn of the core for one frontend, in columns: one or more entries, in order, for each answer
    with new tokens. The core adds to it until it is sent, so it is not a frozen Message."""

    keys: bytes = b""  # int32
    starts: bytes = b""  # int32: output index of the first token
    counts: bytes = b""  # int32: tokens per entry
    token_ids: bytes = b""  # int32, flat: sum(counts)
    accepted: list[int] = []  # keys of the first child of each accepted request, once per submit
    started: list[Started] = []
    missed: list[Missed] = []  # no later than the first tokens of the answer
    finished: list[Finished] = []  # after their last tokens
    logprobs: KeyLogprobs | None = None  # for token_ids; the entries of a key are in token order
    prompt_logprobs: KeyLogprobs | None = None  # for prompts, under the keys of first children


class Prefetched(Message, frozen=True, kw_only=True, tag="prefetched"):
    """Reply to Prefetch, once the blocks are there or cannot be loaded."""

    prefetch_id: int
    num_tokens: int = 0  # as in Done


class Load(Message, frozen=True, kw_only=True, tag="load"):
    """The load that other frontends put on a core, for the router of the receiving frontend."""

    waiting_tokens: int = 0  # tokens of prompts that do not run yet
    num_open: int = 0  # answers


CoreToFrontend: TypeAlias = (
    Welcome
    | GatewayWelcome
    | Refused
    | Unknown
    | EngineCoreOutputs
    | Prefetched
    | Load
    | Pong
    | Ordered  # this and the following are for gateways, which have no supervisor next to the core
    | Progress
    | ReplicaDown
    | WorkersUp
    | WeightsChanged
    | GetBlob  # for an adapter or a medium that a request names
)
