"""Types that models and operations share: metadata of attention and of states, decode state, packed weights, adapter
slots, and fused layers.

`reference.py` states the contract of each operation. Axes: T tokens of the step, R rows (requests), H query heads, E
experts, P positions, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

NormKind: TypeAlias = Literal["rms", "layer"]
ActivationKind: TypeAlias = Literal[
    "none", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "clamp", "swiglu_clamped"
]
ScoreKind: TypeAlias = Literal["softmax", "sigmoid", "softmax_of_chosen"]
ConvActivation: TypeAlias = Literal["none", "silu"]
GateOrder: TypeAlias = Literal["norm_then_silu", "silu_then_norm"]
StateKind: TypeAlias = Literal["gated_delta", "mamba2", "conv"]


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Positions, KV slots and block tables of one step, shared by all layers.

    Every step needs a new object: implementations keep attention plans in it. Decode rows (exactly one query
    token) come first, then prefill rows (any number). The host copies have the same values as the tensors, so that a
    launch does not wait for the device; but if the device computes the lengths (`begin_decode`), those of the host are
    upper bounds.
    """

    positions: Tensor  # [T] int64: each token's row in the rotary table; without media, its index in its request
    slots: Tensor  # [T] int64: block_id * block_size + offset, -1 = do not write
    query_starts: Tensor  # [R + 1] int32: tokens of row r are [query_starts[r], query_starts[r + 1])
    seq_lens: Tensor  # [R] int32: context of each row, this step's tokens included
    block_tables: Tensor  # [R, max_blocks_in_step] int32: ids in order; past a row's last block any valid id (0)
    num_decode_rows: int
    query_starts_host: list[int]
    seq_lens_host: list[int]
    cos_sin: Tensor | None = None  # [T, rotated] float32: a row per token, used instead of each Rotary's table
    see_until: Tensor | None = None  # [T] int32: last index in its request that a token sees; None: its own
    are_windows_two_sided: bool = False  # a layer's window ends as far behind a token as it begins before it
    has_drafts: Tensor | None = None  # [R] int32 in host memory: 1 for a known token followed by drafts; None: all 0
    plans: dict[object, object] = field(default_factory=dict, init=False, repr=False)  # of Ops, for layers alike

    def seen_through(self, window: int | None) -> Tensor | None:
        """Return `see_until` for a layer with this window."""
        if self.see_until is None or window is None or not self.are_windows_two_sided:
            return self.see_until
        return self.see_until.minimum((self.positions + window - 1).int())


@dataclass(frozen=True, eq=False)
class StateMetadata:
    """Tokens of one step in segments, and the blocks with the states before and after each segment.

    A segment is a run of tokens of one row. The segments of a row follow each other: each after the first reads the
    block that the one before it writes. A segment without tokens copies its state. A block that one row writes is
    neither read nor written by another row of the step; several rows may read one block that none writes.
    """

    segment_starts: Tensor  # [G + 1] int32, from 0: segment g has tokens [segment_starts[g], segment_starts[g + 1])
    reads: Tensor  # [G] int32: the block with the state before the segment, -1 = a state of zeros
    writes: Tensor  # [G] int32: the block that gets the state after the segment, -1 = do not write


class StateViews(NamedTuple):
    """The states in the blocks of a group, by layer of the group: strided views of one buffer."""

    scan: list[Tensor]  # [num_blocks, num_heads, key_dim, value_dim] float32
    conv: list[Tensor]  # [num_blocks, num_inputs, num_channels] of the model's dtype


class StateGroup(NamedTuple):
    """The states of the layers that have one, and one step's metadata for them."""

    views: StateViews
    metadata: StateMetadata


class CacheGroup(NamedTuple):
    """The KV cache of layers that share block tables, and one step's metadata for them.

    The metadata of a step's groups differ in `slots` and `block_tables` only. In a group whose layers have a window,
    the entries of a table whose blocks lie wholly before the window may be 0. The bits of a step depend on no slot that
    its tokens do not attend to: NaN may be in block 0, and past the rows' ends.
    """

    kv_cache: Tensor  # [num_blocks, layers of the group, 2, kv_heads, block_size, width]
    metadata: AttentionMetadata


@dataclass(frozen=True, eq=False)
class StepMedia:
    """Embeddings of images or audio in one step, which replace the embeddings of m of the step's T tokens, the
    placeholders."""

    tokens: Tensor  # [m] int64: indices of the placeholders among the step's tokens, each once
    embeds: Tensor  # [m, hidden_size]; not multiplied by the decoder's embedding_scale
    added: Sequence[Tensor] = ()  # [m, hidden_size] each: added[i] is added to the placeholders after layer i


@dataclass(frozen=True, eq=False)
class AuxStates:
    """Auxiliary hidden states of a step: the residual stream between chosen layers, which other models read."""

    depths: Sequence[int]  # layers that the stream has passed, rising: 0 means the embeddings
    out: Tensor  # [T, len(depths) * hidden_size]: is written by the step, for each token the states of all depths


@dataclass(frozen=True, eq=False)
class CrossStep:
    """Encoder rows that the T tokens of a step attend to in each layer, in addition to the tokens of their requests."""

    metadata: AttentionMetadata  # of the T tokens; but block tables, lengths and slots are those of encoder rows
    rows: Tensor | None = None  # [m, hidden_size]: encoder rows whose keys and values the step first writes to `slots`


@dataclass(frozen=True, eq=False)
class BatchColumns:
    """Decode state of the running rows, kept on the device between steps."""

    last_tokens: Tensor  # [rows] int64: the sampled token that the next step computes
    num_computed: Tensor  # [rows] int32: tokens before it, already in the KV cache
    block_tables: Tensor  # [KV groups, rows, max_blocks_per_row] int32
    adapter_slots: Tensor | None = None  # [rows + 1] int32, see AdapterSpace; the last one, for row −1, is 0
    rope_deltas: Tensor | None = None  # [rows] int32: position of a token minus its index in its request; None: zeros


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis, of n elements: x / rms(x) * weight ("rms"), or (x − mean) / deviation * weight + bias
    ("layer"). Computed in float32 and rounded once."""

    kind: NormKind
    weight: Tensor | None  # [n] float32; None: ones
    bias: Tensor | None  # [n] float32; None: zeros
    eps: float


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Norms of query and key heads. The weights are [D], or [heads, D] if each head has its own."""

    query: Norm
    key: Norm
    spans_heads: bool = False  # one norm over all heads of a token, which has [heads, D] weights
    is_after_rope: bool = False


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotation of query and key heads by position."""

    cos_sin: Tensor | None  # [P, rotated] float32: cosines, then sines of each position; None: heads are not rotated
    query_scale: Tensor | None = None  # [P] float32: factor of the query heads at each position


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """Rules by which a layer's attention turns scores into weights."""

    scale: float
    window: int | None = None  # positions that a token attends to, its own included; None: all before it
    softcap: float = 0.0  # c: scores become c * tanh(scores / c) after scaling; 0: no cap
    sinks: Tensor | None = None  # [H] float32: the score of an additional key per head that has no value
    bias: Tensor | None = (
        None  # [H, 2P - 1] float32: a query at index i adds bias[h, k - i + P - 1] to the score of the
    )
    # key at index k, after the cap; i and k are below P


class Activation(NamedTuple):
    """Activation after a linear layer. `is_gated`: the first half of the layer's outputs are gates, the second half
    ups, and the result is act(gate) * up. "clamp", never gated, is clamp(x, ±limit); "swiglu_clamped", always gated,
    is act(min(gate, limit)) * (clamp(up, ±limit) + 1) with act(x) = x * sigmoid(1.702 x)."""

    kind: ActivationKind = "none"
    is_gated: bool = False
    limit: float = 0.0


NO_ACTIVATION = Activation()
GATED_SILU = Activation("silu", is_gated=True)


@dataclass(frozen=True, eq=False)
class Routing:
    """Rules by which a token's experts are chosen and weighted."""

    top_k: int
    score: ScoreKind = "softmax"  # function of the router's outputs; "softmax_of_chosen": over the chosen experts only
    choice_bias: Tensor | None = None  # [E] float32, added to the scores for the choice, not for the weights
    num_groups: int = 1  # groups of experts, of equal size
    top_groups: int = 1  # the number of groups, those with the highest scores, from which experts are chosen
    group_score: Literal["max", "top2"] = "max"  # a group's score: its best expert's, or the sum of its two best
    is_normalized: bool = False  # whether weights are divided by their sum
    scale: float = 1.0  # factor of the weights
    expert_scales: Tensor | None = None  # [E] float32: a further factor of each expert's weight


class PackedLinear(Protocol):
    """Weight, bias and activation of a linear layer in the layout of the Ops that packed it; opaque to layers."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class PackedExperts(Protocol):
    """Weights of all experts of a layer, in the layout of the Ops that packed them."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class LowRankPart:
    """An adapter's update of consecutive outputs of a linear layer: y[first_output + i] += (b @ (a @ x))[i]."""

    first_output: int  # index among the outputs of the weight as given to `pack_linear`
    a: Tensor  # [rank, in_features] of any float type; for an embedding [rank, token ids in this process's table]
    b: Tensor  # [n, rank]
    factor: float = 1.0  # multiplied into b in float32, before b is rounded to the kernels' dtype

    @property
    def scaled_b(self) -> Tensor:
        """b times the factor, in float32."""
        return self.b.float() * self.factor


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """An adapter's update of one linear layer: act(scale * (W x + update of the parts) + bias)."""

    parts: Sequence[LowRankPart]  # for disjoint outputs, in the order of the outputs
    scale: Tensor | None = None  # [outputs of the packed weight] float32: the scale of DoRA; None: ones


class LinearSlots(Protocol):
    """Adapter updates of one linear layer, one per slot."""

    def fill(self, slot: int, update: LowRankUpdate | None) -> None:
        """Set the update of a slot that no running step uses; None removes it: rows of the slot then get the base
        model's outputs. May run in another thread than the steps. The caller may change the matrices afterwards."""
        ...


class ExpertSlots(Protocol):
    """Adapter updates of the experts of one layer: two per slot and expert, one for each of its linear layers."""

    def fill(self, slot: int, ups: Sequence[LowRankUpdate | None], downs: Sequence[LowRankUpdate | None]) -> None:
        """Set the updates of a slot for each expert's first layer (`ups`) and second layer (`downs`), under the
        conditions of LinearSlots.fill. Empty sequences remove all updates of the slot."""
        ...


class AdapterSpace(Protocol):
    """Slots 1 … num_slots for adapters in the layers of one model on one rank; slot 0 means no adapter.

    A row with a slot is computed as `LowRankUpdate` says: a @ x and the sums are float32, and parts are added in their
    order, before scale, bias and activation. A row of slot 0 has the bits of the base model. Other slots in the step
    do not change a row's bits if the operations are batch-invariant."""

    num_slots: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of the attached layers if each slot has an update of the highest rank."""
        ...

    def attach(self, packed: PackedLinear, num_parts: int) -> LinearSlots:
        """Add empty slots to a layer and return them; at most once per layer, before the first step. num_parts: the
        largest number of parts in an update."""
        ...

    def attach_experts(self, packed: PackedExperts, num_parts: int) -> ExpertSlots:
        """Add empty slots to a layer's experts and return them. num_parts: the largest number of parts in an update of
        an expert's first layer; updates of its second layer have one part."""
        ...

    def attach_embedding(self, table: Tensor | PackedLinear, first_id: int) -> LinearSlots:
        """Add empty slots to an embedding and return them; if the table is tied to the head, the slots change look-ups
        only. first_id: the token id of the table's first row."""
        ...

    def begin_step(self, token_slots: Tensor | None) -> None:
        """Set the adapter slots of the tokens that the calls up to the next `begin_step` or `choose_tokens` compute:
        [T] int32 on the device; None if all are 0."""
        ...

    def choose_tokens(self, indices: Tensor) -> None:
        """Announce that the next calls compute only these tokens of the step. indices: [n] int64 into the slots given
        to `begin_step`, regardless of earlier choices."""
        ...

    def wait_for_fills(self) -> None:
        """Wait until steps may use the slots that the calling thread has filled."""
        ...


class ScaledGates(NamedTuple):
    """A gated activation behind a linear layer, whose gates are multiplied by a factor before it."""

    scale: float
    activation: Activation


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """Weights of a dense MLP: x → output_scale * down(up(x))."""

    up: PackedLinear  # packed with the activation, gated or not; if gates are scaled, gates and ups without it
    down: PackedLinear
    scaled_gates: ScaledGates | None = None
    output_scale: float = 1.0  # 1, if the layer has a norm of the output


@dataclass(frozen=True, eq=False)
class ExpertsWeights:
    """Weights of a mixture of experts: x → fused_moe(x, router(x)) + sigmoid(shared_gate(x)) * shared(x)."""

    router: PackedLinear
    routing: Routing
    experts: PackedExperts
    shared: MLPWeights | None  # the expert that computes every token
    shared_gate: PackedLinear | None  # has one output; None: the factor of `shared` is 1


@dataclass(frozen=True, eq=False)
class CrossWeights:
    """Weights of a layer's cross attention: x += output(attention(query(norm(x)))), before the MLP."""

    norm: Norm
    query: PackedLinear
    attention: AttentionSpec
    output: PackedLinear


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Weights of a layer's attention, and the place of its keys and values. x is the normalized stream:

    output_scale * output(attention(qkv(input_scale * x)))    with has_gates output(attention * sigmoid(gates))
    """

    qkv: PackedLinear  # query heads | key heads | value heads, and with has_gates gates of all elements of query heads
    head_norms: HeadNorms | None
    rotary: Rotary
    spec: AttentionSpec
    output: PackedLinear
    has_gates: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0
    group: int = 0  # index of the layer's CacheGroup in a step
    cache_layer: int = 0  # of the group's cache; a FusedLayer or FusedEncoder gets it with each call


@dataclass(frozen=True, eq=False)
class Rates:
    """How fast the heads of a scan forget: a head's number a of a token gives dt = softplus(a + dt_bias), kept between
    limits, and the decay exp(rate * dt)."""

    rate: Tensor  # [heads] float32, negative
    dt_bias: Tensor  # [heads] float32
    min_dt: float = 0.0
    max_dt: float | None = None  # None: unbounded


class StatePart(NamedTuple):
    """A part of a token in a mixer with a state: consecutive outputs of one of its input projections."""

    projection: int  # its index
    start: int  # its first output


@dataclass(frozen=True, eq=False)
class ScanWeights:
    """Shapes and parameters of a scan, and of what comes before and behind it."""

    key_heads: int
    num_heads: int  # of values
    key_dim: int
    value_dim: int
    rates: Rates
    norm: Norm | None  # this and the next two: see Ops.gated_norm
    num_groups: int
    order: GateOrder
    query_norm: Norm | None = None  # of heads, this and the next; None: there is none
    key_norm: Norm | None = None
    beta_scale: float = 1.0
    first_key: int | None = None  # head h of v has (first_key + h) % key_heads of q and k; None: see Ops.state_scan
    skip: Tensor | None = None  # [num_heads] float32: times v, is added to what is read


@dataclass(frozen=True, eq=False)
class StateWeights:
    """Weights of a layer's mixer with a state; StateConfig names the parts of a token. x is the normalized stream:

    gated_delta, mamba2  output_scale * output(gated_norm(scan(conv(parts)), z))    with parts of input_scale * x
    conv                 output_scale * output(z * conv(u * v))
    """

    kind: StateKind
    inputs: Sequence[PackedLinear]  # projections to parts: one, or a second with a and b alone
    input_scales: Sequence[Tensor | None]  # [outputs] of the model's dtype, factors of each projection's outputs
    parts: Mapping[str, StatePart]  # the first projection's begin with those of the convolution, in its order
    conv: Mapping[str, int]  # first channel of each part that passes through the convolution
    conv_weight: Tensor  # this and the next two: see Ops.causal_conv
    conv_bias: Tensor | None
    conv_activation: ConvActivation
    scan: ScanWeights | None  # None: kind "conv"
    output: PackedLinear
    input_scale: float = 1.0
    output_scale: float = 1.0
    index: int = 0  # of the layer in StateViews


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights of a decoder layer; the residual stream is x:

        sequential  x += mixer_output_norm(mixer(input_norm(x))); x += mlp_output_norm(mlp(mlp_norm(x)))
        parallel    n = input_norm(x); x += mixer(n) + mlp(n if mlp_norm is None else mlp_norm(x))
        post-norm   x = mixer_output_norm(x + mixer(x)); x = mlp_output_norm(x + mlp(x))

    The mixer is attention, one with a state, or the sum of both. What is None is left out; a layer without a mixer or
    an MLP has no norms of it. With an output norm the mixer has no output_scale. Parallel layers attend alone.
    """

    input_norm: Norm | None
    attention: AttentionWeights | None
    mixer_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLPWeights | ExpertsWeights | None
    mlp_output_norm: Norm | None
    is_parallel: bool
    is_post_norm: bool = False  # only with attention alone
    cross: CrossWeights | None = None  # only in a sequential layer with attention
    state: StateWeights | None = None


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """Weights and shapes of a single-rank decoder, from token ids to logits."""

    table: Tensor | PackedLinear  # the embedding's table, see Ops.embedding
    positions: Tensor | None  # [P, hidden]: learned position embeddings, added to the token embeddings
    embedding_scale: float
    layers: list[LayerWeights]
    residual_scale: float  # factor of each output that a layer adds to the residual stream
    norm: Norm | None
    head: PackedLinear | None  # None: no token gets logits
    logit_scale: float
    logit_softcap: float  # c: scaled logits become c * tanh(logits / c); 0: no cap
    num_heads: int
    num_kv_heads: int
    head_dim: int
    token_types: Tensor | None = None  # [types, hidden]: added to the token embeddings
    embedding_norm: Norm | None = None  # of the sum of a token's embeddings
    shares_cache: bool = False  # all layers have the same place in the cache, as no later step reads what they write


class FusedLayer(Protocol):
    """A decoder layer in one call."""

    def __call__(
        self,
        x: Tensor,
        rotary: Rotary,
        positions: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Compute x [T, hidden] → [T, hidden]; write keys and values to `layer` of the cache. rotary and positions
        ([T] int64) are used instead of the rotary of the weights and the positions of the metadata."""
        ...


class FusedEncoder(Protocol):
    """The layers of an encoder, each in two calls: the first stores keys and values, the second attends to them."""

    width: int  # elements per row of `heads`: the queries, keys and values of all heads

    def __call__(
        self,
        layer: int,
        hidden: Tensor,
        heads: Tensor,
        kv_cache: Tensor,
        first_row: int,
        metadata: AttentionMetadata | None,
        cos_sin: Tensor | None,
    ) -> None:
        """Complete `layer` (−1: none) for n encoder rows from `first_row` on; start the next layer, if there is one.

        hidden: [n, hidden], changed in place. heads: [n, width], holds the queries of `layer` and, on return, those of
        the next layer. kv_cache: [blocks, 2, 2, heads, block_size, head_dim]; layers use its two layers alternately,
        and encoder row r has slot r. metadata: that of the n rows as tokens, for `layer`; None for −1. cos_sin: [n,
        rotated] float32; None if heads are not rotated. The bits of an encoder row do not depend on the other rows in
        the call, if the metadata's row with it is the same.
        """
        ...


class FusedDecoder(Protocol):
    """The whole decoder in one call."""

    def __call__(
        self,
        token_ids: Tensor,
        logits_indices: Tensor,
        groups: Sequence[CacheGroup],
        media: StepMedia | None = None,
        cross: AttentionMetadata | None = None,
        states: StateGroup | None = None,
        token_types: Tensor | None = None,
        aux: AuxStates | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, hidden] after the final norm, and float32 logits [n, vocab] of some tokens.

        token_ids: [T]. logits_indices: [n] int64, indices of the tokens that get logits. groups: those of the layers,
        see AttentionWeights.group. cross: CrossStep.metadata, if the encoder's keys and values are in the cache
        already; None: layers skip cross attention. states: of the layers that have one. token_types: [T] int32, rows of
        that table; None: all 0. aux: is filled; None: no state of the stream is kept. Writes the step's keys, values
        and states. The next call overwrites what is returned.
        """
        ...
