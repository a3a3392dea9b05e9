"""CpuOps: the operations of `reference.py` in C, for x86-64 processors with AVX2 or better.

Weights are packed once. Every operation is one C call that releases the GIL and runs on torch's OpenMP threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..byte_cache import is_bytes
from ..contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    AdapterSpace,
    AttentionMetadata,
    AttentionSpec,
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
from ..quantized import Kind, QuantizedWeight, Weight, has_four_bits, new_int4
from ..reference import PlainExperts
from ..stored_rows import NUM_FLOAT_KINDS, StoredRows
from . import library as c
from .compiler import Unavailable
from .cpu_experts import CpuExperts, padded_scores
from .fused_decoder import CpuDecoder, CpuLayer
from .fused_encoder import CpuEncoder
from .layer_structs import head_rules, norm_struct, scoring
from .linear_packer import CpuLinear, LinearPacker
from .loader import load_kernels, load_level
from .low_rank import CpuAdapterSpace
from .state_ops import CpuStateOps, has_kernels
from .stored_table import CpuTable, copy_table

MAX_HEAD_DIM = 512  # the largest head_dim of the attention kernels, and of a cache of bytes


@dataclass(frozen=True, eq=False)
class _Plan:
    """An attention plan, freed with this object."""

    library: c.KernelLibrary
    address: int

    def __del__(self) -> None:
        self.library.free_attention_plan(self.address)


class CpuOps(CpuStateOps):
    """The operations in C; those without a kernel are ReferenceOps'. Not thread-safe: owns scratch memory."""

    has_exact_drafts = True
    space: CpuAdapterSpace | None = None

    def __init__(
        self,
        library: c.KernelLibrary,
        dtype: torch.dtype,
        is_batch_invariant: bool = False,
        has_integer_products: bool = False,
    ) -> None:
        """`is_batch_invariant`: a token's bits do not depend on the rest of the batch. `has_integer_products`: see
        LinearPacker."""
        super().__init__(library)
        self.library = library
        self._is_batch_invariant = is_batch_invariant
        self.dtype = dtype
        self._line = int(library.op_line())  # elements in 64 bytes
        self._packer = LinearPacker(library, has_integer_products)
        self.has_integer_products = self._packer.takes_codes
        self.packs_blocks = self._packer.takes_codes or self._packer.unpacks_codes
        self._scratch = torch.empty(0, dtype=dtype)

    def adapter_space(self, num_slots: int, max_rank: int) -> AdapterSpace:
        self.space = CpuAdapterSpace(self.library, self.dtype, num_slots, max_rank)
        return self.space

    def quantize(self, weight: Tensor, kind: Kind) -> QuantizedWeight:
        if kind != "int4" or weight.dtype != self.dtype or not has_four_bits(weight):
            return super().quantize(weight, kind)
        num_out, num_in = weight.shape
        weight = weight.contiguous()
        found = new_int4(weight, self.dtype)
        assert found.zeros is not None
        self.library.fit_four_bits(
            weight.data_ptr(),
            num_out,
            num_in,
            found.qweight.data_ptr(),
            found.scales.data_ptr(),
            found.zeros.data_ptr(),
            torch.get_num_threads(),
        )
        return found

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear, first_id: int) -> Tensor:
        ids, num_threads = token_ids.int().contiguous(), torch.get_num_threads()
        if isinstance(table, Tensor):
            rows = super().embedding(token_ids, table, first_id)
        else:
            assert isinstance(table, CpuLinear | CpuTable)
            look_up = self.library.op_embed_packed if isinstance(table, CpuLinear) else self.library.op_embed_stored
            rows = torch.empty((len(ids), table.in_features), dtype=self.dtype)
            look_up(byref(table.struct), ids.data_ptr(), len(ids), first_id, rows.data_ptr(), num_threads)
        adapted = None if self.space is None else self.space.rows(len(ids))
        if self.space is not None and self.space.embedding is not None and adapted is not None:
            updates, hidden_size = self.space.embedding.table, rows.shape[1]
            self.library.op_embed_updates(
                updates, byref(adapted), ids.data_ptr(), first_id, hidden_size, rows.data_ptr(), num_threads
            )
        return rows

    def pack_table(self, rows: StoredRows) -> Tensor | PackedLinear:
        has_blocks = self.library.op_has_codes() and not (rows.kinds < NUM_FLOAT_KINDS).any()
        return copy_table(self.library, rows) if has_blocks else super().pack_table(rows)

    def pack_linear(self, weight: Weight, bias: Tensor | None, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        return self._packer.pack(weight, bias, activation)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        return self._multiply(x, packed, c.STORE, self.dtype)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._multiply(x, packed, c.STORE_FLOAT, torch.float32)

    def pack_experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Tensor, Tensor] | None = None,
        activation: Activation = GATED_SILU,
    ) -> PackedExperts:
        plain = super().pack_experts(gate_up, down, biases, activation)
        assert isinstance(plain, PlainExperts)
        return CpuExperts.of(plain)

    def fused_moe(self, x: Tensor, scores: Tensor, packed: PackedExperts, routing: Routing) -> Tensor:
        assert isinstance(packed, CpuExperts)
        x, scores, experts = _with_dense_rows(x), padded_scores(scores), packed.struct(routing)
        num_tokens, hidden_size = x.shape
        out = torch.empty((num_tokens, hidden_size), dtype=self.dtype)
        panel = torch.empty(num_tokens * packed.up[0].num_lines * self._line, dtype=self.dtype)
        scratch = torch.empty(self.library.experts_scratch(byref(experts), num_tokens), dtype=torch.uint8)
        adapted = self._adapted(packed.up[0], num_tokens, num_tokens * (routing.top_k + 1))
        self.library.op_mix_experts(
            byref(experts),
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            scores.data_ptr(),
            panel.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
            adapted,
            torch.get_num_threads(),
        )
        return out

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty(x.shape, dtype=self.dtype)
        self._normalize(_with_dense_rows(x.reshape(-1, x.shape[-1])), c.Delta(), norm, out)
        return out

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        if residual.stride(-1) != 1:
            return super().add_norm(x, residual, norm)
        x = _with_dense_rows(x)
        out = torch.empty(residual.shape, dtype=self.dtype)
        self._normalize(residual, c.Delta(x.data_ptr(), x.stride(0), factor=1.0), norm, out)
        return out

    def qk_norm_rope_cache(
        self,
        heads: Tensor,
        norms: HeadNorms | None,
        rotary: Rotary,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_tokens, num_all, head_dim = heads.shape
        num_kv_heads = kv_cache.shape[3]
        num_heads = num_all - 2 * num_kv_heads
        assert heads.stride(1) == head_dim and heads.stride(2) == 1
        if head_dim > MAX_HEAD_DIM and is_bytes(kv_cache):
            return super().qk_norm_rope_cache(heads, norms, rotary, kv_cache, layer, metadata)
        rules = head_rules(norms, rotary)
        work = c.HeadWork(addressof(rules), metadata.positions.data_ptr(), metadata.slots.data_ptr())
        fused = c.Heads(heads.data_ptr(), heads.stride(0), num_tokens, num_heads, num_kv_heads, head_dim)
        cache = _cache_of(kv_cache, layer, head_dim)
        self.library.op_qk_norm_rope_cache(byref(fused), byref(work), byref(cache), torch.get_num_threads())
        return heads[:, :num_heads]

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            return super().paged_attention(query, kv_cache, layer, metadata, spec)
        if query.stride(1) != head_dim or query.stride(2) != 1:
            query = query.contiguous()
        plan = self.plan_of(metadata, num_heads, kv_cache.shape[3], head_dim, spec.window or 0)
        is_padded = num_tokens != metadata.query_starts_host[-1] or 0 in metadata.seq_lens_host
        output = (torch.zeros if is_padded else torch.empty)(query.shape, dtype=self.dtype)
        cache = _cache_of(kv_cache, layer, head_dim)
        self.library.op_attend(
            plan.address,
            query.data_ptr(),
            query.stride(0),
            byref(cache),
            byref(scoring(spec)),
            output.data_ptr(),
            num_heads * head_dim,
            torch.get_num_threads(),
        )
        return output

    def fuse_layer(self, weights: LayerWeights, num_heads: int, num_kv_heads: int, head_dim: int) -> FusedLayer | None:
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            return None
        return CpuLayer(self, weights, num_heads, num_kv_heads, head_dim)

    def fuse_encoder(self, layers: Sequence[LayerWeights], num_heads: int, head_dim: int) -> FusedEncoder | None:
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            return None
        return CpuEncoder(self, layers, num_heads, head_dim)

    def fuse_decoder(self, weights: DecoderWeights) -> FusedDecoder | None:
        if weights.head_dim > MAX_HEAD_DIM or weights.head_dim % 2:
            return None
        if not all(has_kernels(layer.state) for layer in weights.layers if layer.state is not None):
            return None
        return CpuDecoder(self.library, weights, self.dtype, self._is_batch_invariant, self.space)

    def scratch(self, num_elements: int) -> Tensor:
        """Return at least `num_elements` elements of memory, valid until the next call of any operation."""
        if self._scratch.numel() < num_elements:
            self._scratch = torch.empty(num_elements, dtype=self.dtype)
        return self._scratch

    def _multiply(self, x: Tensor, packed: PackedLinear, kind: int, dtype: torch.dtype) -> Tensor:
        assert isinstance(packed, CpuLinear)
        x = _with_dense_rows(x)
        num_rows, num_outputs = x.shape[0], packed.struct.num_outputs
        out = torch.empty((num_rows, num_outputs), dtype=dtype)
        scratch = self.scratch(num_rows * packed.struct.num_lines * self._line)
        output = c.Output(kind, c.Rows(out.data_ptr(), num_outputs, 0))
        self.library.op_linear(
            byref(packed.struct),
            x.data_ptr(),
            x.stride(0),
            num_rows,
            scratch.data_ptr(),
            byref(output),
            self._adapted(packed.struct, num_rows),
            torch.get_num_threads(),
        )
        return out

    def _adapted(self, layer: Structure, num_rows: int, num_shrunk: int = 0) -> object:
        """Return a pointer to a call's rows grouped by adapter slot; None if no row has an adapter or the layer has no
        slots. num_shrunk: see CpuAdapterSpace.rows."""
        if self.space is None or layer.updates is None:
            return None
        adapted = self.space.rows(num_rows, num_shrunk)
        return None if adapted is None else byref(adapted)

    def _normalize(self, x: Tensor, delta: Structure, norm: Norm, out: Tensor) -> None:
        self.library.op_normalize(
            x.data_ptr(),
            x.stride(0),
            byref(delta),
            byref(norm_struct(norm)),
            *x.shape,
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def plan_of(
        self, metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int, window: int
    ) -> _Plan:
        key = (self, num_heads, num_kv_heads, head_dim, window)
        plan = metadata.plans.get(key)
        if plan is None:
            rows = c.step_rows(metadata)
            address = self.library.make_attention_plan(
                byref(rows), num_heads, num_kv_heads, head_dim, window, self._is_batch_invariant
            )
            if address is None:
                raise MemoryError(f"no memory for the attention plan of {len(metadata.seq_lens_host)} rows")
            plan = metadata.plans[key] = _Plan(self.library, address)
        assert isinstance(plan, _Plan)
        return plan


def load_cpu_ops(
    dtype: torch.dtype,
    is_batch_invariant: bool = False,
    spare_folder: Path | None = None,
    isa: str = "auto",
    has_integer_products: bool = False,
) -> CpuOps:
    """Return the operations for models of `dtype`, with the best kernels for this processor, at most of level `isa`.
    `spare_folder`: see `select_ops`. Raises Unavailable if there are no kernels for `dtype` or none can be loaded,
    ValueError if the processor lacks `isa`."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise Unavailable(f"there are no C kernels for {str(dtype).removeprefix('torch.')}: give --dtype bfloat16")
    loaded = load_kernels(dtype == torch.bfloat16, spare_folder, isa)
    ops = CpuOps(loaded.library, dtype, is_batch_invariant, has_integer_products)
    ops.kernels = f"{loaded}{', integer products' if ops.has_integer_products else ''}"
    return ops


def make_cpu_ops(
    dtype: torch.dtype, level: str, is_batch_invariant: bool = False, has_integer_products: bool = False
) -> CpuOps:
    """Return the operations with the kernels of one of `instruction_levels()`, for comparisons. Raises Unavailable if
    these cannot be loaded."""
    library = load_level(level, dtype == torch.bfloat16).library
    return CpuOps(library, dtype, is_batch_invariant, has_integer_products)


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _cache_of(kv_cache: Tensor, layer: int, head_dim: int) -> Structure:
    num_kv_heads, block_size, _ = kv_cache.shape[3:]
    address, block_bytes = kv_cache[:, layer].data_ptr(), kv_cache.stride(0) * kv_cache.element_size()
    return c.Cache(address, block_bytes, num_kv_heads, block_size, head_dim, c.cache_kind(kv_cache))
