"""ReferenceOps: the contract of every model operation, and its implementation in plain torch for any device and dtype.

Kernels are tested against it within stated tolerances, and fall back to it. Axes: T tokens of the step, R rows
(requests), H heads, D head_dim.

    kv_cache  [num_blocks, num_layers, 2, num_kv_heads, block_size, D]; 2 is key, value. Zeroed when allocated.
              If its dtype is int8 or uint8, D + 4 takes the place of D: see byte_cache.py. The last four axes are
              dense.
    block 0   the null block, owned by no row. Padding of block tables is 0, and slot -1 may be written there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import byte_cache
from .contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    AdapterSpace,
    AttentionMetadata,
    AttentionSpec,
    BatchColumns,
    DecoderWeights,
    FusedDecoder,
    FusedEncoder,
    FusedLayer,
    HeadNorms,
    LayerWeights,
    Norm,
    PackedExperts,
    PackedLinear,
    Rotary,
    Routing,
)
from .plain_weights import PlainExperts as PlainExperts
from .plain_weights import PlainLinear as PlainLinear
from .plain_weights import plain_table as plain_table
from .quantized import Kind, QuantizedWeight, Weight, as_floats, quantize
from .reference_adapters import PlainAdapterSpace, update_outputs
from .reference_attention import attend, bias_of, gather, mask_of
from .reference_rows import advance_rows
from .reference_state import causal_conv, gated_norm, sigmoid, state_decay, state_scan
from .stored_rows import StoredRows


class ReferenceOps:
    """The operations in plain torch. The only state between calls are adapters: their slots, and those of the tokens.

    All tensors are on one device and have the model's dtype unless stated otherwise. Shapes are not checked.
    """

    kernels = "plain torch"  # for logs
    has_exact_drafts = False  # whether a token has the same bits alone and followed by drafts
    has_integer_products = False  # whether int8 and int4 weights are multiplied as integers
    packs_blocks = False  # whether matrices are wanted in the blocks of a GGUF file, see StoredRows
    _plain_space: PlainAdapterSpace | None = None
    query_chunk_size = 256  # tokens of a row per attention call: bounds the mask and the keys outside of the window

    def adapter_space(self, num_slots: int, max_rank: int) -> AdapterSpace:
        """Create and return slots for adapters of ranks up to `max_rank`; from now on the operations add their updates.
        Called at most once, before weights are packed. Layers are attached after they are packed and before they are
        fused into a decoder."""
        self._plain_space = PlainAdapterSpace(num_slots, max_rank)
        return self._plain_space

    def quantize(self, weight: Tensor, kind: Kind) -> QuantizedWeight:
        """Quantize a weight [out, in] of any floating dtype, with the bits of `quantized.quantize`."""
        return quantize(weight, kind)

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """Look up rows of `table` [n, hidden] for ids in [first_id, first_id + n), zeros for all others: [T, hidden].

        A table that is tied to the head is passed packed, one of blocks as `pack_table` returned it. token_ids: [T]
        int32 or int64.
        """
        weight = plain_table(table)
        rows = token_ids.long() - first_id
        is_foreign = (rows < 0) | (rows >= weight.shape[0])
        embedded = F.embedding(rows.masked_fill(is_foreign, 0), weight).masked_fill(is_foreign[:, None], 0)
        if self._plain_space is not None:
            self._plain_space.update_embedding(embedded, rows, is_foreign)
        return embedded

    def pack_table(self, rows: StoredRows) -> Tensor | PackedLinear:
        """Return an embedding's table for `embedding`: the rows as floats of their checkpoint's dtype, or opaque."""
        return rows.read_floats()

    def begin_step(self, token_ids: Tensor, rows: BatchColumns, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """Compute `embedding`, with token id −1 − r replaced by the last token of row r."""
        last_tokens = rows.last_tokens[(-1 - token_ids).clamp(min=0)]
        return self.embedding(torch.where(token_ids < 0, last_tokens, token_ids), table, first_id)

    def begin_decode(
        self,
        row_ids: Tensor,
        rows: BatchColumns,
        groups: Sequence[AttentionMetadata],
        block_size: int,
        table: Tensor | PackedLinear,
        first_id: int,
    ) -> Tensor:
        """Prepare a decode step of the rows `row_ids` [n] int64, each at most once; return their last tokens'
        embeddings [n, hidden].

        groups: the step's metadata for each KV group; their positions and seq_lens are the same tensors. Writes these,
        and each group's slots and block tables (at least the entries that a row uses), adds 1 to the rows'
        num_computed, and passes the rows' adapter slots to AdapterSpace.begin_step. Row −1 is padding: position 0, slot
        −1, length 0 and an embedding of zeros.
        """
        advance_rows(row_ids, rows, groups, block_size)
        if self._plain_space is not None and rows.adapter_slots is not None:
            self._plain_space.begin_step(rows.adapter_slots[row_ids])
        last_tokens = rows.last_tokens[row_ids.clamp(min=0)].masked_fill(row_ids < 0, first_id - 1)
        return self.embedding(last_tokens, table, first_id)

    def pack_linear(self, weight: Weight, bias: Tensor | None, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        """Pack weight [out, in] and bias [out] for `linear`. The result may refer to them or hold copies; they are not
        written to.

        A gated activation halves the outputs: out_features is out / 2. An implementation without a kernel for a
        quantized weight dequantizes it.
        """
        return PlainLinear(as_floats(weight), bias, activation)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Multiply x [T, in] by the packed weight, add its bias and apply its activation: [T, out_features].

        `packed` was packed by the same Ops.
        """
        assert isinstance(packed, PlainLinear)
        return self.adapted_linear(x, packed, self._token_slots)

    def adapted_linear(self, x: Tensor, packed: PlainLinear, token_slots: Tensor | None) -> Tensor:
        """Compute `linear` for tokens with the adapter slots `token_slots` [T] int32; None: all 0."""
        outputs = F.linear(x, packed.weight, packed.bias)
        if token_slots is not None and packed.slots is not None:
            update_outputs(outputs, x, packed, packed.slots.updates, token_slots)
        return self.activate(outputs, packed.activation)

    @property
    def _token_slots(self) -> Tensor | None:
        return None if self._plain_space is None else self._plain_space.token_slots

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Compute `linear` as float32 [T, out], possibly more precise than the model's dtype."""
        return self.linear(x, packed).float()

    def pack_experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Tensor, Tensor] | None = None,
        activation: Activation = GATED_SILU,
    ) -> PackedExperts:
        """Pack each expert's gate_up [2 n, hidden], gates first, and down [hidden, n].

        biases: those of gate_up [E, 2 n] and of down [E, hidden]. An expert's routing weight multiplies its down bias.
        """
        up_biases, down_biases = biases or ([None] * len(gate_up), [None] * len(down))
        return PlainExperts(
            [self.pack_linear(weight, bias, activation) for weight, bias in zip(gate_up, up_biases, strict=True)],
            [self.pack_linear(weight, bias) for weight, bias in zip(down, down_biases, strict=True)],
        )

    def fused_moe(self, x: Tensor, scores: Tensor, packed: PackedExperts, routing: Routing) -> Tensor:
        """Pass x [T, hidden] through the experts that `routing` chooses by scores [T, E]; return their weighted sum.

        The sum is accumulated in float32, here in the order of expert ids; other implementations may use the order of
        scores.
        """
        assert isinstance(packed, PlainExperts)
        weights, experts = route(scores, routing)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, ranks = torch.where(experts == expert)
            up, down = packed.gate_up[expert], packed.down[expert]
            assert isinstance(up, PlainLinear) and isinstance(down, PlainLinear)
            slots = None if self._token_slots is None else self._token_slots[tokens]
            outputs = self.adapted_linear(self.adapted_linear(x[tokens], up, slots), down, slots)
            total.index_add_(0, tokens, outputs * weights[tokens, ranks, None])
        return total.to(x.dtype)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize x [..., n] over its last axis."""
        wide = x.float()
        if norm.kind == "rms":
            return F.rms_norm(wide, x.shape[-1:], norm.weight, norm.eps).to(x.dtype)
        return F.layer_norm(wide, x.shape[-1:], norm.weight, norm.bias, norm.eps).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Add x to `residual` in place, then return norm(residual). x, residual: [T, n]."""
        residual += x
        return self.norm(residual, norm)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Compute act(x) [..., n], or if gated act(gate) * up [..., n] of x [..., 2n]. May overwrite x."""
        kind, is_gated, limit = activation
        if kind == "clamp":
            return x.clamp_(-limit, limit)
        if not is_gated:
            return _ACTIVATIONS[kind](x)
        gate, up = x.chunk(2, dim=-1)
        if kind == "swiglu_clamped":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(gate * 1.702) * (up + 1)
        return _ACTIVATIONS[kind](gate).mul_(up)

    sigmoid = staticmethod(sigmoid)
    state_decay = staticmethod(state_decay)
    causal_conv = staticmethod(causal_conv)
    state_scan = staticmethod(state_scan)
    gated_norm = staticmethod(gated_norm)

    def qk_norm_rope_cache(
        self,
        heads: Tensor,
        norms: HeadNorms | None,
        rotary: Rotary,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Normalize and rotate query and key heads, store keys and values; return the query heads [T, H, D].

        heads: [T, H + 2 * num_kv_heads, D], query | key | value; overwritten, and the result may be a view of it. The
        first n elements of a head are rotated; element i is paired with i + n / 2 (NeoX style). Keys and values are
        stored at `metadata.slots` of `layer`, NaN and infinities as 0, so that they reach no other row that shares the
        block.
        """
        num_kv_heads = kv_cache.shape[3]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None and not norms.is_after_rope:
            self.norm_heads(query, norms.query, norms.spans_heads)
            self.norm_heads(key, norms.key, norms.spans_heads)
        if rotary.cos_sin is not None:
            self.rotate(heads[:, : num_heads + num_kv_heads], metadata.positions, rotary.cos_sin)
        if norms is not None and norms.is_after_rope:
            self.norm_heads(query, norms.query, norms.spans_heads)
            self.norm_heads(key, norms.key, norms.spans_heads)
        if rotary.query_scale is not None:
            query.copy_(query * rotary.query_scale[metadata.positions, None, None])
        self.store_kv(key, value, kv_cache, layer, metadata)
        return query

    def norm_heads(self, heads: Tensor, norm: Norm, spans_heads: bool) -> None:
        """Normalize heads [T, H, D] in place: each by itself, or with `spans_heads` all heads of a token as one."""
        if spans_heads:
            whole = Norm(norm.kind, _flat(norm.weight), _flat(norm.bias), norm.eps)
            heads.copy_(self.norm(heads.flatten(1), whole).view(heads.shape))
        elif norm.weight is None or norm.weight.dim() == 1:
            heads.copy_(self.norm(heads, norm))
        else:
            plain = F.rms_norm if norm.kind == "rms" else F.layer_norm
            wide: Tensor = plain(heads.float(), heads.shape[-1:], eps=norm.eps) * norm.weight
            heads.copy_(wide if norm.bias is None else wide + norm.bias)

    def rotate(self, heads: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate the first n elements of each head in `heads` [T, H, D] in place; its last stride is 1. positions: [T]
        int64, each < P. cos_sin: [P, n]."""
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, n / 2] each
        first, second = heads[..., : cos_sin.shape[1]].chunk(2, dim=-1)
        rotated_first = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated_first)

    def store_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, metadata: AttentionMetadata) -> None:
        """Write key and value [T, num_kv_heads, D] to the step's slots in `layer` of the cache, NaN and infinities
        as 0."""
        slots, block_size = metadata.slots.clamp(min=0), kv_cache.shape[4]  # -1 becomes the null block
        blocks, offsets = slots // block_size, slots % block_size
        for side, heads in enumerate((key, value)):
            finite = torch.nan_to_num(heads, nan=0.0, posinf=0.0, neginf=0.0)
            target = kv_cache[:, layer, side]
            if byte_cache.is_bytes(kv_cache):
                numbers, scales = byte_cache.parts(target.flatten(2), block_size)
                numbers[blocks, :, offsets], scales[blocks, :, offsets] = byte_cache.encode(finite, kv_cache.dtype)
            else:
                target[blocks, :, offsets] = finite

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """Compute causal attention of query [T, H, D] over each row's own context in `layer`: [T, H, D].

        Query head h reads KV head h // (H / num_kv_heads). A token at index p attends to [0, p], or [max(0, p - w + 1),
        p] with a sliding window w; if `metadata.seen_through` is not None, it is the end of these ranges instead of p.
        This step's keys and values are already in the cache.
        """
        output, starts, block_size = torch.zeros_like(query), metadata.query_starts_host, kv_cache.shape[4]
        seen = metadata.seen_through(spec.window)
        for row, length in enumerate(metadata.seq_lens_host):
            if length == 0:  # padding
                continue
            for start in range(starts[row], starts[row + 1], self.query_chunk_size):
                stop = min(start + self.query_chunk_size, starts[row + 1])
                last = length - (starts[row + 1] - stop) - 1  # index of the last query
                position = last - (stop - start) + 1  # index of the first query
                see_until = None if seen is None else seen[start:stop]
                end = 1 + (last if see_until is None else int(see_until.max()))
                first = 0 if spec.window is None else max(0, position - spec.window + 1)
                blocks = metadata.block_tables[row, first // block_size : -(-end // block_size)]
                places = slice(first % block_size, first % block_size + end - first)
                key, value = gather(kv_cache, layer, blocks, query.dtype)[..., places, :]
                mask = None
                if stop - start > 1:
                    mask = mask_of(range(position, last + 1), range(first, end), spec.window, see_until, query.device)
                bias = bias_of(range(position, last + 1), range(first, end), spec)
                output[start:stop] = attend(query[start:stop], key, value, spec, mask, bias)
        return output

    def fuse_layer(self, weights: LayerWeights, num_heads: int, num_kv_heads: int, head_dim: int) -> FusedLayer | None:
        """Build a layer that runs in one call, equal to its operations within rounding; None if there is no kernel."""
        return None

    def fuse_encoder(self, layers: Sequence[LayerWeights], num_heads: int, head_dim: int) -> FusedEncoder | None:
        """Build the layers of an encoder as a FusedEncoder; None if there is no kernel."""
        return None

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        """Build a decoder that runs in one call, equal to its layers within rounding; None if there is no kernel."""
        return None


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return weights [T, top_k] float32 and ids [T, top_k] of the chosen experts, by falling score (choice_bias
    included) and, if equal, by rising id. scores: [T, E], the router's outputs."""
    wide = scores.float()
    probabilities = {"softmax": wide.softmax(dim=-1), "sigmoid": sigmoid(wide)}.get(routing.score, wide)
    choice = probabilities if routing.choice_bias is None else probabilities + routing.choice_bias
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, choice.shape[1] // routing.num_groups)
        best = groups.amax(-1) if routing.group_score == "max" else groups.topk(2, dim=-1)[0].sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_groups]
        is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
        choice = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_k]
    weights = probabilities.gather(1, experts)
    if routing.score == "softmax_of_chosen":
        weights = weights.softmax(dim=-1)
    if routing.is_normalized:
        total = weights[:, :1].clone()
        for rank in range(1, routing.top_k):  # the rounding of torch's sum may depend on the number of rows
            total += weights[:, rank : rank + 1]
        weights = weights / total
    if routing.expert_scales is not None:
        weights = weights * routing.expert_scales[experts]
    return weights * routing.scale, experts


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.flatten()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
