"""ReferenceOps: the contract of every model operation, and its implementation in plain torch for any device and dtype.

Kernels are tested against it within stated tolerances, and fall back to it. Axes: T tokens of the step, R rows
(requests), H heads, D head_dim.

    kv_cache  [num_blocks, num_layers, 2, num_kv_heads, block_size, D]; 2 is key, value. Zeroed when allocated.
              If its dtype is uint8, D + 4 takes the place of D: see fp8_cache.py.
    block 0   the null block, owned by no row. Padding of block tables is 0, and slot -1 may be written there.
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
    """Linear layer of a float weight [out, in] and a bias [out]."""

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
    """Experts of a layer, each as two packed linear layers."""

    gate_up: list[PackedLinear]
    down: list[PackedLinear]

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in (*self.gate_up, *self.down))


class ReferenceOps:
    """The operations in plain torch; keeps no state between calls.

    All tensors are on one device and have the model's dtype unless stated otherwise. Shapes are not checked.
    """

    kernels = "plain torch"  # for logs
    query_chunk_size = 256  # tokens of a row per attention call: bounds the mask, and the keys gathered in vain

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """Look up rows of `table` [n, hidden] for ids in [first_id, first_id + n), zeros for all others: [T, hidden].

        A table that is tied to the head is passed packed. token_ids: [T] int32 or int64.
        """
        weight = plain_table(table)
        rows = token_ids.long() - first_id
        is_foreign = (rows < 0) | (rows >= weight.shape[0])
        return F.embedding(rows.masked_fill(is_foreign, 0), weight).masked_fill(is_foreign[:, None], 0)

    def begin_step(self, token_ids: Tensor, rows: BatchColumns, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        """Compute `embedding`, with token id −1 − r replaced by the last token of row r."""
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
        """Prepare a decode step of the rows `row_ids` [n] int64, each at most once; embed their last tokens.

        Writes the metadata's positions, slots, seq_lens and block tables (only the entries that a row uses), and adds
        1 to the rows' num_computed. Row −1 is padding: position 0, slot −1, length 0 and an embedding of zeros.
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
        """Pack weight [out, in] and bias [out] for `linear`, by reference or as a copy; never write to them.

        `is_gated`: the first half of the rows are gates, the second half ups; out_features is out / 2. An
        implementation without a kernel for a quantized weight dequantizes it.
        """
        return PlainLinear(as_floats(weight), bias, is_gated)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Multiply x [T, in] by the packed weight and add its bias: [T, out]. `packed` was packed by the same Ops.

        A gated layer returns silu(first half) * second half: [T, out / 2].
        """
        assert isinstance(packed, PlainLinear)
        outputs = F.linear(x, packed.weight, packed.bias)
        return self.silu_and_mul(outputs) if packed.is_gated else outputs

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Compute `linear` as float32 [T, out], possibly more precise than the model's dtype."""
        return self.linear(x, packed).float()

    def pack_experts(self, gate_up: Sequence[Weight], down: Sequence[Weight]) -> PackedExperts:
        """Pack each expert's gate_up [2 n, hidden], gates first, and down [hidden, n]."""
        return PlainExperts(
            [self.pack_linear(weight, None, is_gated=True) for weight in gate_up],
            [self.pack_linear(weight, None) for weight in down],
        )

    def fused_moe(self, x: Tensor, scores: Tensor, packed: PackedExperts, top_k: int, is_normalized: bool) -> Tensor:
        """Pass x [T, hidden] through the `top_k` experts with the highest scores [T, E]; return their weighted sum.

        Weights are the softmax of all scores in float32; `is_normalized` divides them by the sum of the top k. The sum
        is accumulated in float32, in the order of expert ids or of scores.
        """
        assert isinstance(packed, PlainExperts)
        weights, experts = route(scores, top_k, is_normalized)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, ranks = torch.where(experts == expert)
            outputs = self.linear(self.linear(x[tokens], packed.gate_up[expert]), packed.down[expert])
            total.index_add_(0, tokens, outputs * weights[tokens, ranks, None])
        return total.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute x / rms(x) * weight over the last axis, the mean in float32. x: [..., n], weight: [n]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, then return rms_norm(residual). x, residual: [T, n]."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Compute silu(gate) * up [..., n] of x [..., 2n], which holds gate, then up."""
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

        heads: [T, H + 2 * num_kv_heads, D], query | key | value; overwritten, and the result may be a view of it.
        norms: weights [D] of the RMS norms of query and key heads. cos_sin: [P, D] float32, D/2 cosines then D/2 sines
        per position < P (neox style: element i pairs with i + D/2). Keys and values are stored at `metadata.slots` of
        `layer`, NaN and infinities as 0: masked attention multiplies stale values by 0, and 0 * NaN is NaN, so they
        would poison the block's next owner.
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
        """Rotate `heads` [T, H, D] in place; its last stride is 1. positions: [T] int64, each < P."""
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, D / 2] each
        first, second = heads.chunk(2, dim=-1)
        rotated_first = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated_first)

    def store_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, metadata: AttentionMetadata) -> None:
        """Write key and value [T, num_kv_heads, D] to the step's slots, NaN and infinities as 0."""
        slots, block_size = metadata.slots.clamp(min=0), kv_cache.shape[4]  # -1 becomes the null block
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
        """Compute causal attention of query [T, H, D] over each row's own context in `layer`: [T, H, D].

        Query head h reads KV head h // (H / num_kv_heads). A token at position p attends to positions [0, p], or
        [max(0, p - w + 1), p] with a sliding window w. This step's keys and values are already in the cache.
        """
        output, starts, block_size = torch.zeros_like(query), metadata.query_starts_host, kv_cache.shape[4]
        for row, length in enumerate(metadata.seq_lens_host):
            if length == 0:  # padding
                continue
            for start in range(starts[row], starts[row + 1], self.query_chunk_size):
                stop = min(start + self.query_chunk_size, starts[row + 1])
                end = length - (starts[row + 1] - stop)
                first = 0 if sliding_window is None else max(0, end - (stop - start) - sliding_window + 1)
                blocks = metadata.block_tables[row, first // block_size : -(-end // block_size)]
                seen = slice(first % block_size, first % block_size + end - first)
                key, value = _gather(kv_cache, layer, blocks, query.dtype)[..., seen, :]
                output[start:stop] = _attend(query[start:stop], key, value, scale, sliding_window)
        return output

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        """Build a single-call decoder, equal to the layers within rounding; None if there is no such kernel."""
        return None


def plain_table(table: Tensor | PackedLinear) -> Tensor:
    """Return an embedding table as a tensor [n, hidden]; one that is tied to the head is in a PlainLinear."""
    weight = table.weight if isinstance(table, PlainLinear) else table
    assert isinstance(weight, Tensor)
    return weight


def route(scores: Tensor, top_k: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return weights [T, top_k] float32 and ids of the experts with the highest scores [T, E], in falling order; equal
    scores by rising id."""
    ranked, order = scores.softmax(dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights, experts = ranked[:, :top_k], order[:, :top_k]
    if is_normalized:
        total = weights[:, :1].clone()
        for rank in range(1, top_k):  # the rounding of torch's sum may depend on the number of rows
            total += weights[:, rank : rank + 1]
        weights = weights / total
    return weights, experts


def _gather(kv_cache: Tensor, layer: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the keys and values of one row's blocks [n] in a layer: [2, num_kv_heads, n * block_size, D]."""
    _, num_layers, _, num_kv_heads, block_size, width = kv_cache.shape
    heads = torch.arange(2 * num_kv_heads, device=blocks.device).view(2, num_kv_heads, 1)
    tiles = (blocks.long() * num_layers + layer) * (2 * num_kv_heads) + heads
    found = kv_cache.view(-1, block_size * width).index_select(0, tiles.flatten())
    if fp8_cache.is_fp8(kv_cache):
        found = fp8_cache.decode(found, block_size, dtype)
    return found.reshape(2, num_kv_heads, len(blocks) * block_size, -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute attention of query [Q, H, D], the last Q positions of key and value [num_kv_heads, S, D]: [Q, H, D].

    scaled_dot_product_attention computes scores and softmax in float32 for every dtype.
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
