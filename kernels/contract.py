"""Types of the operations' arguments: attention metadata, decode state and packed weights.

`reference.py` states the contract of each operation. Axes: T tokens of the step, R rows (requests), D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

NormKind: TypeAlias = Literal["rms", "layer"]
ActivationKind: TypeAlias = Literal[
    "none", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "clamp", "swiglu_clamped"
]
ScoreKind: TypeAlias = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Positions, KV slots and block tables of one step, shared by all layers.

    Every step needs a new object: implementations cache attention plans by its identity. Decode rows (exactly one query
    token) come first, then prefill rows (any number). The host copies have the same values as the tensors, so that a
    launch does not wait for the device.
    """

    positions: Tensor  # [T] int64: row of the rotary table for each token: its index in its request, if it has no media
    slots: Tensor  # [T] int64: block_id * block_size + offset, -1 = do not write
    query_starts: Tensor  # [R + 1] int32: tokens of row r are [query_starts[r], query_starts[r + 1])
    seq_lens: Tensor  # [R] int32: context of each row, this step's tokens included
    block_tables: Tensor  # [R, max_blocks_in_step] int32: ids in order; past a row's last block any valid id (0)
    num_decode_rows: int
    query_starts_host: list[int]
    seq_lens_host: list[int]
    cos_sin: Tensor | None = None  # [T, rotated] float32: of this step's tokens, in place of each Rotary's table
    see_until: Tensor | None = None  # [T] int32: last index in its request that a token sees; None: its own
    has_drafts: Tensor | None = (
        None  # [R] int32, on the host: not 0 for a known token with drafts; None: no row has any
    )


@dataclass(frozen=True, eq=False)
class StepMedia:
    """Embeddings of media in one step, in place of those of m of its T tokens, which are placeholders."""

    tokens: Tensor  # [m] int64: their indices, each once
    embeds: Tensor  # [m, hidden_size]; not scaled as the embeddings of tokens may be
    added: Sequence[Tensor] = ()  # [m, hidden_size] each: added behind the first layers, one by one


@dataclass(frozen=True, eq=False)
class CrossStep:
    """Rows of encoders that the T tokens of a step attend to in each layer, besides the tokens of their requests."""

    metadata: (
        AttentionMetadata  # of these tokens, with tables and lengths of encoder rows; its slots are those of `rows`
    )
    rows: Tensor | None = None  # [m, hidden_size]: encoder rows whose keys and values the step writes first


@dataclass(frozen=True, eq=False)
class BatchColumns:
    """Decode state of the running rows, kept on the device between steps."""

    last_tokens: Tensor  # [rows] int64: the sampled token that the next step computes
    num_computed: Tensor  # [rows] int32: tokens before it, already in the KV cache
    block_tables: Tensor  # [rows, max_blocks_per_row] int32
    adapter_slots: Tensor | None = None  # [rows + 1] int32, see AdapterSpace; the last, of row −1, is 0
    rope_deltas: Tensor | None = None  # [rows] int32: added to a token's index for its position; None: zeros


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
    """How a layer's attention maps scores to weights."""

    scale: float
    window: int | None = None  # positions that a token attends to, its own included; None: all before it
    softcap: float = 0.0  # c: scores become c * tanh(scores / c) after scaling; 0: they stay
    sinks: Tensor | None = None  # [H] float32: the score of one more key per head, without a value


class Activation(NamedTuple):
    """Activation behind a linear layer. `is_gated`: the layer's first half are gates, its second half ups, and the
    result is act(gate) * up. "clamp", never gated, is clamp(x, ±limit); "swiglu_clamped", always gated, is
    act(min(gate, limit)) * (clamp(up, ±limit) + 1) with act(x) = x * sigmoid(1.702 x)."""

    kind: ActivationKind = "none"
    is_gated: bool = False
    limit: float = 0.0


NO_ACTIVATION = Activation()
GATED_SILU = Activation("silu", is_gated=True)


@dataclass(frozen=True, eq=False)
class Routing:
    """How experts are chosen for a token, and weighted."""

    top_k: int
    score: ScoreKind = "softmax"  # of the router's outputs; "softmax_of_chosen": over the chosen experts alone
    choice_bias: Tensor | None = None  # [E] float32, added to the scores for the choice, not for the weights
    num_groups: int = 1  # of experts, of equal size
    top_groups: int = 1  # groups with the highest scores, from which experts are chosen
    group_score: Literal["max", "top2"] = "max"  # of a group: its best score, or the sum of its two best
    is_normalized: bool = False  # weights are divided by their sum
    scale: float = 1.0  # factor of the weights
    expert_scales: Tensor | None = None  # [E] float32: one more factor of each expert's weight


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

    first_output: int  # in the order of the outputs of the weight that was packed
    a: Tensor  # [rank, in_features] of any float type; of an embedding [rank, ids of this rank]
    b: Tensor  # [n, rank]
    factor: float = 1.0  # of b, multiplied in float32 before it is rounded to the kernels' type

    @property
    def scaled_b(self) -> Tensor:
        """b times the factor, in float32."""
        return self.b.float() * self.factor


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """An adapter's update of one linear layer: act(scale * (W x + update of the parts) + bias)."""

    parts: Sequence[LowRankPart]  # of disjoint outputs, in their order
    scale: Tensor | None = None  # [outputs of the packed weight] float32, of DoRA; None: ones


class LinearSlots(Protocol):
    """Updates of one linear layer, by slot."""

    def fill(self, slot: int, update: LowRankUpdate | None) -> None:
        """Set the update of a slot that no step in flight uses, perhaps from another thread than that of the steps.
        The matrices may change after it returns. None: rows of the slot get the base's outputs."""
        ...


class ExpertSlots(Protocol):
    """Updates of the experts of one layer, by slot."""

    def fill(self, slot: int, ups: Sequence[LowRankUpdate | None], downs: Sequence[LowRankUpdate | None]) -> None:
        """Set the updates of a slot as LinearSlots.fill, one of each sequence for each expert; or none: empty ones."""
        ...


class AdapterSpace(Protocol):
    """Slots 1 … num_slots for adapters in the layers of one model on one rank; slot 0 stands for none.

    The contract of a row with a slot is that of `LowRankUpdate`: a @ x and the sums in float32, parts in their order,
    added before scale, bias and activation. A row depends on itself and its slot only, and a row of slot 0 has the
    bits of the base."""

    num_slots: int

    @property
    def nbytes(self) -> int:
        """Memory of all slots of the attached layers, each with an update of the highest rank."""
        ...

    def attach(self, packed: PackedLinear, num_parts: int) -> LinearSlots:
        """Give a layer slots, all empty. Each layer at most once, before the first step. num_parts: the most parts of
        an update."""
        ...

    def attach_experts(self, packed: PackedExperts, num_parts: int) -> ExpertSlots:
        """Give experts slots. num_parts: the most parts of an update of an expert's first layer; of its second, 1."""
        ...

    def attach_embedding(self, table: Tensor | PackedLinear, first_id: int) -> LinearSlots:
        """Give an embedding slots; a table that is tied to the head gets them for its look-ups alone."""
        ...

    def begin_step(self, token_slots: Tensor | None) -> None:
        """Set the slots of the tokens of all calls up to the next `begin_step` or `choose_tokens`: [T] int32, on the
        device; None if all are 0."""
        ...

    def choose_tokens(self, indices: Tensor) -> None:
        """Keep the slots of these tokens of the step alone, for the calls that follow. indices: [n] int64, in the order
        of the slots of `begin_step`, whatever was chosen before."""
        ...

    def wait_for_fills(self) -> None:
        """Wait until steps may use the slots that the calling thread has filled."""
        ...


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """Weights of a dense MLP."""

    up: PackedLinear  # with the activation, gated or not
    down: PackedLinear


@dataclass(frozen=True, eq=False)
class ExpertsWeights:
    """Weights of a layer with experts, whose weighted outputs are added: x → fused_moe(x, router(x)) + shared(x), the
    last multiplied by sigmoid(shared_gate(x))."""

    router: PackedLinear
    routing: Routing
    experts: PackedExperts
    shared: MLPWeights | None  # of the expert that every token passes
    shared_gate: PackedLinear | None  # with one output


@dataclass(frozen=True, eq=False)
class CrossWeights:
    """Weights of a layer's cross attention: x += output(attention(query(norm(x)))), in front of the MLP."""

    norm: Norm
    query: PackedLinear
    attention: AttentionSpec
    output: PackedLinear


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights of a decoder layer; the residual stream is x:

        sequential  x += attention_output_norm(attention(input_norm(x))); x += mlp_output_norm(mlp(mlp_norm(x)))
        parallel    n = input_norm(x); x += attention(n) + mlp(n if mlp_norm is None else mlp_norm(x))

    A norm that is None is left out.
    """

    input_norm: Norm | None
    qkv: PackedLinear  # query heads | key heads | value heads
    head_norms: HeadNorms | None
    rotary: Rotary
    attention: AttentionSpec
    output: PackedLinear
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLPWeights | ExpertsWeights
    mlp_output_norm: Norm | None
    is_parallel: bool
    cross: CrossWeights | None = None  # of a sequential layer


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """Weights and shapes of a single-rank decoder, from token ids to logits."""

    table: Tensor | PackedLinear  # of the embedding, see Ops.embedding
    positions: Tensor | None  # [P, hidden]: learned embeddings, added to the tokens'
    embedding_scale: float
    layers: list[LayerWeights]
    residual_scale: float  # of what a layer adds to the residual stream
    norm: Norm
    head: PackedLinear
    logit_scale: float
    logit_softcap: float  # as AttentionSpec.softcap, after the scale
    num_heads: int
    num_kv_heads: int
    head_dim: int


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
        """Compute x [T, hidden] → [T, hidden]; write keys and values to `layer` of the cache. rotary: in place of the
        weights', of heads at `positions` [T] int64, in place of the metadata's."""
        ...


class FusedEncoder(Protocol):
    """The layers of an encoder, each in two calls: the first leaves keys and values, to which the second attends."""

    width: int  # elements of a row of queries, keys and values

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
        """Complete `layer` (−1: none) for the rows from `first_row` on, and begin the next one, if there is one.

        hidden: [n, hidden], changed in place. heads: [n, width] queries of `layer`, then of the next one. kv_cache:
        [blocks, 2, 2, heads, block_size, head_dim], in which layers take turns, and row r of all has slot r. metadata:
        of n tokens, for `layer`. cos_sin: [n, rotated] float32, if heads are rotated. A row has the same bits, whatever
        the others are, if the same row of the metadata holds it.
        """
        ...


class FusedDecoder(Protocol):
    """A forward pass of the whole decoder in one call."""

    def __call__(
        self,
        token_ids: Tensor,
        logits_indices: Tensor,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        media: StepMedia | None = None,
        cross: AttentionMetadata | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute hidden states [T, hidden] after the final norm, and float32 logits [n, vocab] of some tokens.

        token_ids: [T]. logits_indices: [n] int64, indices of the tokens that get logits. cross: that of CrossStep, for
        keys and values in the cache; None: layers leave cross attention out. Writes the step's keys and values. The
        next call overwrites the returned tensors.
        """
        ...
