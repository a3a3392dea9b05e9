"""CpuDecoder and CpuLayer: a whole decoder step, or one layer of it, as one C call (step.c), for a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, Structure, addressof, byref, c_int64, c_void_p
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from ..contract import (
    AttentionMetadata,
    AuxStates,
    CacheGroup,
    DecoderWeights,
    ExpertsWeights,
    LayerWeights,
    MLPWeights,
    Rotary,
    StateGroup,
    StepMedia,
)
from . import library as c
from .cpu_experts import experts_struct
from .layer_structs import attention_struct, linear_struct, norm_struct, scoring
from .linear_packer import CpuLinear
from .low_rank import CpuAdapterSpace
from .state_ops import MixerStruct, StepStates
from .stored_table import CpuTable

MAX_GROUPS = 8  # of layers that share block tables, in one model
MAX_POSITIONS = (1 << 31) - 1  # of a model without rotary or position tables: lengths are int32


class Plan(Protocol):
    @property
    def address(self) -> int: ...


class LayerOwner(Protocol):
    """The operations (CpuOps) whose scratch memory and attention plans a CpuLayer or a CpuEncoder uses."""

    library: c.KernelLibrary

    def scratch(self, num_elements: int) -> Tensor: ...

    def plan_of(
        self, metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int, window: int
    ) -> Plan: ...


class Places:
    """The C structs of the groups' caches and of a step's places in them. Those of the same caches are used again."""

    def __init__(self) -> None:
        self._caches: list[Callable[[], Tensor | None]] = [lambda: None] * MAX_GROUPS
        self._structs = (c.CacheGroup * MAX_GROUPS)()

    def of(self, groups: Sequence[CacheGroup]) -> int:
        """Return the address of the structs, which the next call overwrites; the caller must keep the groups alive."""
        for index, (kv_cache, metadata) in enumerate(groups):
            struct = self._structs[index]
            if self._caches[index]() is not kv_cache:
                self._describe(index, kv_cache)
            struct.slots = metadata.slots.data_ptr()
            struct.block_tables = metadata.block_tables.data_ptr()
            struct.table_stride = metadata.block_tables.stride(0)
        return addressof(self._structs)

    def _describe(self, index: int, kv_cache: Tensor) -> None:
        struct = self._structs[index]
        assert kv_cache[:1].is_contiguous()
        struct.kv_cache = kv_cache.data_ptr()
        struct.block_stride = kv_cache.stride(0) * kv_cache.element_size()
        struct.block_size = kv_cache.shape[4]
        struct.kind = c.cache_kind(kv_cache)
        self._caches[index] = ref(kv_cache)


class CpuDecoder:
    """Decoder in C, called once per step. Owns its structs, the weights, and buffers for the largest step so far."""

    def __init__(
        self,
        library: c.KernelLibrary,
        weights: DecoderWeights,
        dtype: torch.dtype,
        is_batch_invariant: bool,
        space: CpuAdapterSpace | None = None,
    ) -> None:
        self._library = library
        self._weights = weights
        self._dtype = dtype
        self._hidden_size = _hidden_size_of(weights)
        attending = [each.attention for each in weights.layers if each.attention is not None]
        tables = [weights.positions, *(each.rotary.cos_sin for each in attending)]
        self._num_positions = min((len(table) for table in tables if table is not None), default=MAX_POSITIONS)
        mlps = [each.mlp for each in weights.layers]
        places = {(each.group, each.cache_layer) for each in attending}
        assert weights.shares_cache or len(places) == len(attending), "two layers have the same place in the cache"
        self._experts = [experts_struct(mlp) if isinstance(mlp, ExpertsWeights) else None for mlp in mlps]
        self._mixers = [None if each.state is None else MixerStruct(each.state) for each in weights.layers]
        self._layers = (c.Layer * len(mlps))(*map(layer_struct, weights.layers, self._experts, self._mixers))
        self._space = space
        self._top_k = max((mlp.routing.top_k for mlp in mlps if isinstance(mlp, ExpertsWeights)), default=0)
        self._decoder = self._describe(weights, is_batch_invariant)
        self._places, self._states = Places(), StepStates()
        self._scratch = torch.empty(0, dtype=dtype)
        self._hidden = torch.empty((0, self._hidden_size), dtype=dtype)
        self._logits = torch.empty((0, 0 if weights.head is None else weights.head.out_features))
        self._outputs = self._hidden, self._logits  # views of the last call's shapes, which the next often repeats

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
        metadata = groups[0].metadata
        num_tokens, num_logits = token_ids.shape[0], logits_indices.shape[0]
        assert max(metadata.seq_lens_host, default=0) <= self._num_positions, "a context is longer than the tables"
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        if self._outputs[0].shape[0] != num_tokens or self._outputs[1].shape[0] != num_logits:
            self._make_room(num_tokens, num_logits)
        step = c.Step(
            token_ids.data_ptr(),
            metadata.positions.data_ptr(),
            num_tokens,
            c.step_rows(metadata),
            self._places.of(groups),
            self._hidden.data_ptr(),
            logits_indices.data_ptr(),
            num_logits,
            self._logits.data_ptr(),
        )
        given = None if media is None else _Given(media, self._dtype)
        if given is not None:
            step.media = addressof(given.struct)
        if token_types is not None:
            assert token_types.dtype == torch.int32 and token_types.is_contiguous()
            step.token_types = token_types.data_ptr()
        if states is not None:
            step.states = self._states.of(states, num_tokens)
        places = None if aux is None else self._keep(step, aux)
        across = None if cross is None else c.step_rows(cross)
        if across is not None:
            step.cross = addressof(across)
        if metadata.cos_sin is not None:
            cos_sin = metadata.cos_sin
            assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
            step.cos_sin = cos_sin.data_ptr()
        if self._space is not None:
            self._adapt(step, self._space, logits_indices)
        result = self._library.decoder_step(
            byref(self._decoder), byref(step), self._scratch.data_ptr(), torch.get_num_threads()
        )
        if result != 0:
            raise MemoryError(f"no memory for the attention plan of {len(metadata.seq_lens_host)} rows")
        del places  # the step pointed to it
        return self._outputs

    def _keep(self, step: Structure, aux: AuxStates) -> Array[c_int64]:
        """Set a step's fields for the states that it keeps; return the array to which they point."""
        assert aux.out.shape == (step.num_tokens, len(aux.depths) * self._hidden_size)
        assert aux.out.dtype == self._dtype and aux.out.is_contiguous()
        place_by_depth = {depth: place for place, depth in enumerate(aux.depths)}
        places = [place_by_depth.get(depth, -1) for depth in range(len(self._weights.layers) + 1)]
        array = (c_int64 * len(places))(*places)
        step.aux_places, step.aux_states, step.num_aux = addressof(array), aux.out.data_ptr(), len(aux.depths)
        return array

    def _adapt(self, step: Structure, space: CpuAdapterSpace, logits_indices: Tensor) -> None:
        """Set a step's fields for adapters."""
        of_step, of_logits = space.step_rows(logits_indices, step.num_tokens * (self._top_k + 1))
        step.adapted = None if of_step is None else addressof(of_step)
        step.logits_adapted = None if of_logits is None else addressof(of_logits)
        step.embedding_updates = None if space.embedding is None else addressof(space.embedding.table)

    def _make_room(self, num_tokens: int, num_logits: int) -> None:
        if self._hidden.shape[0] < num_tokens:
            self._hidden = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype)
            num_elements = self._library.decoder_scratch(byref(self._decoder), num_tokens)
            self._scratch = torch.empty(num_elements, dtype=self._dtype)
        if self._logits.shape[0] < num_logits:
            self._logits = torch.empty((num_logits, self._logits.shape[1]))
        self._outputs = self._hidden[:num_tokens], self._logits[:num_logits]

    def _describe(self, weights: DecoderWeights, is_batch_invariant: bool) -> Structure:
        table = weights.table
        return c.Decoder(
            layers=addressof(self._layers),
            num_layers=len(weights.layers),
            hidden_size=self._hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            embedding_scale=weights.embedding_scale,
            residual_scale=weights.residual_scale,
            logit_scale=weights.logit_scale,
            logit_softcap=weights.logit_softcap,
            final_norm=norm_struct(weights.norm),
            packed_table=addressof(table.struct) if isinstance(table, CpuLinear) else None,
            stored_table=addressof(table.struct) if isinstance(table, CpuTable) else None,
            table=table.data_ptr() if isinstance(table, Tensor) else None,
            num_ids=table.shape[0] if isinstance(table, Tensor) else table.out_features,
            learned_positions=_address(weights.positions),
            token_types=_address(weights.token_types),
            embedding_norm=norm_struct(weights.embedding_norm),
            head=None if weights.head is None else addressof(linear_struct(weights.head)),
            is_batch_invariant=is_batch_invariant,
        )


def _hidden_size_of(weights: DecoderWeights) -> int:
    table = weights.table
    return table.shape[1] if isinstance(table, Tensor) else table.in_features


def _address(table: Tensor | None) -> int | None:
    """Return the address of a table of embeddings, for its struct."""
    if table is None:
        return None
    assert table.is_contiguous()
    return table.data_ptr()


class _Given:
    """The C struct of a step's media, and the tensors that it points to."""

    def __init__(self, media: StepMedia, dtype: torch.dtype) -> None:
        self._tensors = [each.to(dtype).contiguous() for each in (media.embeds, *media.added)]
        self._tokens = media.tokens.contiguous()
        embeds, *added = [each.data_ptr() for each in self._tensors]
        self._added = (c_void_p * max(len(added), 1))(*added)
        self.struct = c.Media(self._tokens.data_ptr(), len(self._tokens), embeds, addressof(self._added), len(added))


class CpuLayer:
    """A decoder layer in C, with the scratch memory and the attention plans of its owner."""

    def __init__(
        self, owner: LayerOwner, weights: LayerWeights, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self._owner, self._weights = owner, weights
        assert weights.attention is not None, "the layer attends"
        self._layer = layer_struct(weights)
        self._places = Places()
        self._shape = (num_heads, num_kv_heads, head_dim, weights.attention.spec.window or 0)
        self._decoder = c.Decoder(
            layers=addressof(self._layer),
            num_layers=1,
            hidden_size=weights.attention.qkv.in_features,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            residual_scale=1.0,
        )

    def __call__(
        self,
        x: Tensor,
        rotary: Rotary,
        positions: Tensor,
        kv_cache: Tensor,
        layer: int,
        metadata: AttentionMetadata,
    ) -> Tensor:
        stream = x.contiguous().clone()
        library, cos_sin, num_tokens = self._owner.library, rotary.cos_sin, len(x)
        self._layer.attention.rules.cos_sin = None if cos_sin is None else cos_sin.data_ptr()
        self._layer.attention.rules.num_rotated = 0 if cos_sin is None else cos_sin.shape[1]
        self._layer.attention.cache_layer = layer
        step = c.Step(
            positions=positions.data_ptr(),
            num_tokens=num_tokens,
            groups=self._places.of([CacheGroup(kv_cache, metadata)]),
            hidden=stream.data_ptr(),
        )
        scratch = self._owner.scratch(library.decoder_scratch(byref(self._decoder), num_tokens))
        plan = self._owner.plan_of(metadata, *self._shape)
        library.layer_step(byref(self._decoder), byref(step), plan.address, scratch.data_ptr(), torch.get_num_threads())
        return stream


def layer_struct(
    weights: LayerWeights, experts: Structure | None = None, mixer: MixerStruct | None = None
) -> Structure:
    layer = c.Layer(
        gate_scale=1.0,
        mlp_output_scale=1.0,
        mixer=None if mixer is None else addressof(mixer.struct),
        experts=None if experts is None else addressof(experts),
        has_attention=weights.attention is not None,
        has_mlp=weights.mlp is not None,
        input_norm=norm_struct(weights.input_norm),
        mixer_output_norm=norm_struct(weights.mixer_output_norm),
        mlp_norm=norm_struct(weights.mlp_norm),
        mlp_output_norm=norm_struct(weights.mlp_output_norm),
        is_parallel=weights.is_parallel,
        is_post_norm=weights.is_post_norm,
    )
    if weights.attention is not None:
        layer.attention = attention_struct(weights.attention)
    if weights.cross is not None:
        layer.cross_norm, layer.cross_scoring = norm_struct(weights.cross.norm), scoring(weights.cross.attention)
        layer.cross_query, layer.cross_output = linear_struct(weights.cross.query), linear_struct(weights.cross.output)
    if isinstance(weights.mlp, MLPWeights):
        layer.up, layer.down = linear_struct(weights.mlp.up), linear_struct(weights.mlp.down)
        layer.mlp_output_scale, gates = weights.mlp.output_scale, weights.mlp.scaled_gates
        if gates is not None:
            layer.gate_scale, layer.limit = gates.scale, gates.activation.limit
            layer.activation = c.ACTIVATIONS[gates.activation.kind]
    return layer
