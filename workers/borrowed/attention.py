"""The attention function of borrowed layers: transformers' attention interface over our paged KV cache.

A layer calls `attend` with the queries, keys and values of all tokens of the step. The first forward pass of a model
is a trial: it records the shapes and arguments of each layer's call as an AttentionCall, and refuses arguments that
this function would ignore. Later passes store keys and values in the step's slots and read the paged cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...kernels.contract import AttentionMetadata, AttentionSpec, Rotary
from ...kernels.select import Ops
from ..step.kv_cache import KVCacheSpec
from ..step.model_step import StepContext
from .arguments import Angles, Arguments, recorded_arguments

IMPLEMENTATION = "tokenloom"  # our name among transformers' attention functions
Attend: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]

# Arguments that do not change causal attention over a row's own context.
HARMLESS = (
    "position_ids",
    "position_embeddings",
    "cache_position",
    "past_key_values",
    "past_key_value",
    "cache_params",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "num_items_in_batch",
    "dropout",
    "layer_head_mask",
    "deterministic",
    "target_dtype",
)
KNOWN = frozenset(("scaling", "sliding_window", "softcap", "s_aux", "is_causal", *HARMLESS))


class Unserved(Exception):
    """Error that says why an architecture cannot be served with transformers' layers."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Shapes and rules of one layer's attention, as the layer called it in the trial."""

    name: str  # the module's name
    layer: int  # the layer's index in the KV cache
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    spec: AttentionSpec


class PagedAttention:
    """The attention of one model. Owns the calls of its layers, which the trial records."""

    def __init__(self, ops: Ops) -> None:
        self.calls: dict[nn.Module, AttentionCall] = {}
        self.arguments: dict[nn.Module, Arguments] = {}  # of each module's call in the trial
        self._ops = ops
        self._names: dict[nn.Module, str] = {}
        self._context: StepContext | None = None
        self._num_kv_heads = self._width = 1  # KV heads and elements per head of the KV cache
        self._storing: AttentionMetadata | None = None
        self._rotary = Rotary(None)
        self._by_token: AttentionMetadata | None = None
        self._rotations: dict[int, tuple[Tensor, Rotary]] = {}  # of this step, by id() of the cosines

    @contextlib.contextmanager
    def trial(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Record the attention calls of the forward pass in this context, instead of attending. The pass raises
        Unserved for a call that cannot be served; the exit does so if one KV cache cannot hold all layers."""
        self._names = {module: name for name, module in model.named_modules()}
        with attending(self.attend), recorded_arguments(model) as given:
            yield
        calls = self.calls.values()
        self.arguments = given
        self._width = max((max(call.key_dim, call.value_dim) for call in calls), default=1)
        self._num_kv_heads = _common_heads(list(calls))
        self._names = {}
        half = torch.ones(1, self._width // 2, device=device)
        self._rotary = Rotary(torch.cat([half, torch.zeros_like(half)], dim=1) if self._width % 2 == 0 else None)

    @contextlib.contextmanager
    def step(self, context: StepContext) -> Iterator[None]:
        """Attend over the KV cache in this context; it must contain one forward pass of the step."""
        self._context = context
        # Layers have already rotated their heads. At position 0 the kernel rotates by an angle of 0.
        self._storing = replace(context.metadata, positions=torch.zeros_like(context.metadata.positions))
        num_tokens = len(context.metadata.positions)
        tokens = torch.arange(num_tokens, device=context.metadata.positions.device)
        self._by_token = replace(context.metadata, positions=tokens)
        try:
            with attending(self.attend):
                yield
        finally:
            self._context = None
            self._rotations.clear()

    @property
    def context(self) -> StepContext:
        """The context of the step that runs."""
        assert self._context is not None
        return self._context

    def is_widest(self, call: AttentionCall) -> bool:
        """Return whether a layer's heads have the number and size of the cache's heads, so that they need no
        padding."""
        return call.key_dim == call.value_dim == self._width and call.num_kv_heads == self._num_kv_heads

    def rotation(self, angles: Angles | None) -> tuple[Rotary, AttentionMetadata]:
        """Return the rotation by the angles of this step's tokens (None: no rotation), and the step's metadata with
        positions that are rows of this rotation's table."""
        assert self._storing is not None and self._by_token is not None
        if angles is None:
            return self._rotary, self._storing
        cosines, sines = angles
        known = self._rotations.get(id(cosines))  # layers share them; an entry keeps the tensor alive, and so its id
        if known is None:
            half = cosines.shape[-1] // 2
            cos_sin = torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=-1).float()
            known = self._rotations[id(cosines)] = (cosines, Rotary(cos_sin))
        return known[1], self._by_token

    def kv_cache_spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """Return the shape of a cache that fits the widest layer; a model without attention gets one narrow layer."""
        return KVCacheSpec(max(len(self.calls), 1), self._num_kv_heads, self._width, block_size, dtype)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute causal attention of query [1, H, T, D] over each row's context: [1, T, H, D of the values]. In the
        trial, record the call and return zeros."""
        if self._context is None or self._storing is None:
            self._record(module, query, key, value, options)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        call, dtype = self.calls[module], query.dtype
        kv_cache, metadata = self._context.groups[0]
        heads = torch.cat([self._fit(each, call, kv_cache) for each in (query, key, value)], dim=1)
        fitted = self._ops.qk_norm_rope_cache(heads, None, self._rotary, kv_cache, call.layer, self._storing)
        attended = self._ops.paged_attention(fitted, kv_cache, call.layer, metadata, call.spec)
        return attended[None, :, :, : call.value_dim].to(dtype)

    def _fit(self, heads: Tensor, call: AttentionCall, kv_cache: Tensor) -> Tensor:
        """Return heads [1, H, T, D] as [T, H, D of the cache]; KV heads are repeated up to the cache's number."""
        heads = heads[0].transpose(0, 1)
        if heads.shape[1] == call.num_kv_heads != self._num_kv_heads and call.num_heads != call.num_kv_heads:
            heads = heads.repeat_interleave(self._num_kv_heads // call.num_kv_heads, dim=1)
        if heads.shape[2] < self._width:
            heads = nn.functional.pad(heads, (0, self._width - heads.shape[2]))
        if heads.dtype != kv_cache.dtype and kv_cache.dtype.is_floating_point:
            heads = heads.to(kv_cache.dtype)
        return heads

    def _record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
        name = self._names.get(module, type(module).__name__)
        if module in self.calls:
            raise Unserved(f"its layer {name} attends twice in a step")
        for option, given in options.items():
            if option not in KNOWN and given is not None and given is not False:
                raise Unserved(f"its layer {name} gives attention an argument that is not served: {option}")
        if options.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
            raise Unserved(f"its layer {name} attends to later tokens (is_causal is false)")
        if query.shape[2] != key.shape[2] or query.shape[0] != 1:
            raise Unserved(
                f"its layer {name} attends from {query.shape[2]} tokens to {key.shape[2]} keys of its own making"
            )
        scale, sinks = options.get("scaling"), options.get("s_aux")
        self.calls[module] = AttentionCall(
            name=name,
            layer=len(self.calls),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=query.shape[3],
            value_dim=value.shape[3],
            spec=AttentionSpec(
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=options.get("sliding_window"),
                softcap=options.get("softcap") or 0.0,
                sinks=None if sinks is None else sinks.float().flatten(),
            ),
        )


_CURRENT: ContextVar[Attend] = ContextVar("tokenloom_attention")  # the function of the model that is running


@contextlib.contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Pass the attention calls of layers in this context to `attend`."""
    token = _CURRENT.set(attend)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Pass a layer's call to the function of the running model (see `attending`) and return its result. Raises Unserved
    if there is a mask: transformers makes none for this function, so the layer itself has made it."""
    if attention_mask is not None:
        raise Unserved(f"a layer {type(module).__name__} makes an attention mask of its own")
    return _CURRENT.get()(module, query, key, value, options), None


def _common_heads(calls: list[AttentionCall]) -> int:
    """Return the number of KV heads of a cache that can hold all layers. Raises Unserved if there is none."""
    if not calls:
        return 1
    most = max(call.num_kv_heads for call in calls)
    for call in calls:
        if most % call.num_kv_heads or call.num_heads % most:
            raise Unserved(
                f"its layer {call.name} has {call.num_heads} heads and {call.num_kv_heads} KV heads, another has "
                f"{most} KV heads: one cache cannot hold both"
            )
    return most
