"""ReferenceOps: every operation a model is made of: its contract, and the same in plain torch for any device and dtype.

The specification that other kernels are compared with, within a stated tolerance, and the fallback where there are
none. Axes: T tokens of the step, R rows (requests), H heads, D head_dim.

    kv_cache  [num_blocks, num_layers, 2, num_kv_heads, block_size, D]; 2 is key, value. Zeroed when allocated.
              One of uint8 has D + 4 in the place of D: see fp8_cache.py.
    block 0   is the null block: no row owns it; padded block tables point at it, and what is told not to be written
              may land there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fp8_cache
from .contract import AttentionMetadata, BatchColumns, DecoderWeights, FusedDecoder, PackedExperts, PackedLinear
from .quantized import Weight, as_floats


@dataclass(frozen=True)
class PlainLinear:
    """A weight [out, in] and bias [out] as they came."""

    weight: Tensor
    bias: Tensor | None
    is_gated: bool = False

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // (2 if self.is_gated else 1)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, eq=False)
class PlainExperts:
    """Two packed linears of each expert."""

    gate_up: list[PackedLinear]
    down: list[PackedLinear]

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in (*self.gate_up, *self.down))


class ReferenceOps:
    """Tensors lie on one device and have the model's dtype unless stated otherwise. Shapes are the caller's duty: a
    wrong one is a fault of ours and raises whatever torch raises.

    Keeps nothing between calls. `queries_at_once`: tokens of one row whose attention is computed together. `kernels`:
    what computes, for people.
    """

    kernels = "plain torch"
    queries_at_once = 256  # a mask is bounded, and few keys are gathered that lie after all of them

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """Rows of `table` [n, hidden] for ids in [first_id, first_id + n), zeros for all others.

        A table that is also the weight of a linear (a tied head) is given as packed. token_ids: [T] int32 or int64.
        Returns [T, hidden].
        """
        weight = plain_table(table)
        rows = token_ids.long() - first_id
        is_foreign = (rows < 0) | (rows >= weight.shape[0])
        return F.embedding(rows.masked_fill(is_foreign, 0), weight).masked_fill(is_foreign[:, None], 0)

    def begin_step(self, token_ids: Tensor, rows: BatchColumns, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """`embedding`, where token id −1 − r stands for the last token of row r."""
        last_tokens = rows.last_tokens[(-1 - token_ids).clamp(min=0)]
        return self.embedding(torch.where(token_ids < 0, last_tokens, token_ids), table, first_id)

    def begin_decode(
        self,
        row_ids: Tensor,
        rows: BatchColumns,
        metadata: AttentionMetadata,
        block_size: int,
        table: Tensor | PackedLinear,
        first_id: int,
    ) -> Tensor:
        """Begin a decode step of the rows `row_ids` [n] int64, each at most once: `embedding` of their last tokens.

        Fills in the metadata's positions, slots, lengths and block tables (a row's own blocks, not what is past them)
        and counts the tokens as computed. Row −1 is padding: position 0, slot −1, length 0 and an embedding of zeros.
        """
        is_padding = row_ids < 0
        live = row_ids.clamp(min=0)
        positions, tables = rows.num_computed[live], rows.block_tables[live]
        blocks = tables.gather(1, (positions // block_size).long()[:, None])[:, 0].long()
        slots = blocks * block_size + positions % block_size
        metadata.positions.copy_(positions.masked_fill(is_padding, 0))
        metadata.slots.copy_(slots.masked_fill(is_padding, -1))
        metadata.seq_lens.copy_((positions + 1).masked_fill(is_padding, 0))
        metadata.block_tables[:, : tables.shape[1]] = tables
        rows.num_computed.index_add_(0, live, (~is_padding).int())
        return self.embedding(rows.last_tokens[live].masked_fill(is_padding, first_id - 1), table, first_id)

    def pack_linear(self, weight: Weight, bias: Tensor | None, is_gated: bool = False) -> PackedLinear:
        """Take weight [out, in] and bias [out]: keep them or copy them reordered. Neither is ever written to.

        `is_gated`: the first half of the rows are gates, the second what they let through (out_features is out / 2).
        A quantized weight may be kept as it is or, where there is no kernel for it, as what it stands for.
        """
        return PlainLinear(as_floats(weight), bias, is_gated)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [T, in] times the packed weight, plus its bias: [T, out]. `packed` was made by the same Ops.

        Of a gated one silu(first half) * second half: [T, out / 2].
        """
        assert isinstance(packed, PlainLinear)
        outputs = F.linear(x, packed.weight, packed.bias)
        return self.silu_and_mul(outputs) if packed.is_gated else outputs

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`linear` in float32, which may be more precise than the model's dtype: [T, out]."""
        return self.linear(x, packed).float()

    def pack_experts(self, gate_up: Sequence[Weight], down: Sequence[Weight]) -> PackedExperts:
        """Take, of each expert, a gated weight [2 n, hidden] and one [hidden, n] that leads back."""
        return PlainExperts(
            [self.pack_linear(weight, None, is_gated=True) for weight in gate_up],
            [self.pack_linear(weight, None) for weight in down],
        )

    def fused_moe(self, x: Tensor, scores: Tensor, packed: PackedExperts, top_k: int, is_normalized: bool) -> Tensor:
        """x [T, hidden] through the `top_k` experts of each token's highest scores [T, E]; their weighted sum.

        The weights are the softmax of all scores in float32; `is_normalized`: divided by the sum of the chosen ones.
        A sum goes through the experts in the order of their numbers or of their scores, and is kept in float32.
        """
        assert isinstance(packed, PlainExperts)
        weights, experts = route(scores, top_k, is_normalized)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, places = torch.where(experts == expert)
            answers = self.linear(self.linear(x[tokens], packed.gate_up[expert]), packed.down[expert])
            mixed.index_add_(0, tokens, answers * weights[tokens, places, None])
        return mixed.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis, the mean taken in float32. x: [..., n], weight: [n]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, then return rms_norm(residual). Both [T, n]."""
        residual += x
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [..., 2n] holds gate and up side by side: silu(gate) * up, [..., n]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def qk_norm_rope_cache(
        self,
        heads: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Normalize and rotate query and key heads, store keys and values; return the query heads [T, H, D].

        heads: [T, H + 2 * num_kv_heads, D], query | key | value; overwritten, and the answer may be a part of it.
        norms: weights [D] of the RMS norms of query and key heads. cos_sin: [P, D] float32, D/2 cosines then D/2 sines
        for each position < P (neox halves: element i goes with i + D/2). Keys and values go to `metadata.slots` of
        `layer`; slot -1 writes nothing that counts. NaN and infinities are stored as 0, so that a request that
        overflowed cannot poison the one that gets its block next (masked attention multiplies stale values by 0, and
        0 * NaN is NaN).
        """
        num_kv_heads = kv_cache.shape[3]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query.copy_(self.rms_norm(query, norms[0], eps))
            key.copy_(self.rms_norm(key, norms[1], eps))
        self.rotary(heads[:, : num_heads + num_kv_heads], metadata.positions, cos_sin)
        self.store_kv(key, value, kv_cache, layer, metadata)
        return query

    def rotary(self, heads: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate `heads` [T, H, D] in place; any strides, last one 1. positions: [T] int64, each < P."""
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, D / 2] each
        first, second = heads.chunk(2, dim=-1)
        rotated_first = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated_first)

    def store_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, metadata: AttentionMetadata) -> None:
        """Write key and value [T, num_kv_heads, D] to the step's slots, NaN and infinities as 0."""
        slots, block_size = metadata.slots.clamp(min=0), kv_cache.shape[4]  # -1: into the null block
        blocks, offsets = slots // block_size, slots % block_size
        for side, heads in enumerate((key, value)):
            finite = torch.nan_to_num(heads, nan=0.0, posinf=0.0, neginf=0.0)
            target = kv_cache[:, layer, side]
            if fp8_cache.is_fp8(kv_cache):
                numbers, scales = fp8_cache.parts(target.flatten(2), block_size)
                numbers[blocks, :, offsets], scales[blocks, :, offsets] = fp8_cache.encode(finite)
            else:
                target[blocks, :, offsets] = finite

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Causal attention of query [T, H, D] over each row's own context in `layer`: [T, H, D].

        Query head h reads KV head h // (H / num_kv_heads). A token at position p sees positions [0, p], or with a
        sliding window w [max(0, p - w + 1), p]. Keys and values of this step were stored before.
        """
        output, starts, block_size = torch.zeros_like(query), metadata.query_starts_host, kv_cache.shape[4]
        for row, length in enumerate(metadata.seq_lens_host):
            if length == 0:  # padding
                continue
            for start in range(starts[row], starts[row + 1], self.queries_at_once):
                stop = min(start + self.queries_at_once, starts[row + 1])
                end = length - (starts[row + 1] - stop)
                first = 0 if sliding_window is None else max(0, end - (stop - start) - sliding_window + 1)
                blocks = metadata.block_tables[row, first // block_size : -(-end // block_size)]
                seen = slice(first % block_size, first % block_size + end - first)
                key, value = _gather(kv_cache, layer, blocks, query.dtype)[..., seen, :]
                output[start:stop] = _attend(query[start:stop], key, value, scale, sliding_window)
        return output

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        """The decoder as one operation, equal to its layers within rounding; None: run them one by one."""
        return None


def plain_table(table: Tensor | PackedLinear) -> Tensor:
    """An embedding table [n, hidden], which may be the weight of a linear as well."""
    weight = table.weight if isinstance(table, PlainLinear) else table
    assert isinstance(weight, Tensor)
    return weight


def route(scores: Tensor, top_k: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, top_k] float32 and numbers of the experts with the highest scores [T, E], likeliest first; of
    equals the lower number first."""
    ranked, order = scores.softmax(dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights, experts = ranked[:, :top_k], order[:, :top_k]
    if is_normalized:
        total = weights[:, :1].clone()
        for place in range(1, top_k):  # one by one: torch's sum may round by the number of rows
            total += weights[:, place : place + 1]
        weights = weights / total
    return weights, experts


def _gather(kv_cache: Tensor, layer: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values of one row's blocks [n] in a layer: [2, num_kv_heads, n * block_size, D]."""
    _, num_layers, _, num_kv_heads, block_size, width = kv_cache.shape
    heads = torch.arange(2 * num_kv_heads, device=blocks.device).view(2, num_kv_heads, 1)
    tiles = (blocks.long() * num_layers + layer) * (2 * num_kv_heads) + heads
    found = kv_cache.view(-1, block_size * width).index_select(0, tiles.flatten())
    if fp8_cache.is_fp8(kv_cache):
        found = fp8_cache.decode(found, block_size, dtype)
    return found.reshape(2, num_kv_heads, len(blocks) * block_size, -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """query [Q, H, D] stands at the last Q positions of key and value [num_kv_heads, S, D] → [Q, H, D].

    Scores and softmax are float32 inside scaled_dot_product_attention, whatever the dtype.
    """
    num_queries, num_keys, mask = query.shape[0], key.shape[1], None
    if num_queries > 1:
        mask = torch.ones((num_queries, num_keys), dtype=torch.bool, device=query.device)
        mask = mask.tril(num_keys - num_queries)
        if window is not None:
            mask = mask.triu(num_keys - num_queries - window + 1)
    is_grouped = query.shape[1] > key.shape[0]
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key[None], value[None], mask, scale=scale, enable_gqa=is_grouped
    )
    return attended[0].transpose(0, 1)
