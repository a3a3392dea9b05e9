"""C structs of the contract's norms, rotations, attention rules, routings and packed linears.

They hold addresses only: callers keep the contract's objects alive.
"""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from ..contract import AttentionSpec, AttentionWeights, HeadNorms, Norm, PackedLinear, Rotary, Routing
from . import library as c

_NORM_KINDS = {"rms": 1, "layer": 2}  # NormKind; 0: no norm


def norm_struct(norm: Norm | None) -> Structure:
    """Build the struct of a norm; None: a norm that changes nothing."""
    if norm is None:
        return c.Norm()
    bias = norm.bias if norm.kind == "layer" else None
    return c.Norm(_NORM_KINDS[norm.kind], norm.eps, _floats(norm.weight), _floats(bias))


def head_rules(norms: HeadNorms | None, rotary: Rotary) -> Structure:
    """Build the struct of the norms and the rotation of query and key heads."""
    cos_sin = rotary.cos_sin
    rules = c.HeadRules(
        cos_sin=_floats(cos_sin),
        num_rotated=0 if cos_sin is None else cos_sin.shape[1],
        query_scale=_floats(rotary.query_scale),
    )
    if norms is not None:
        rules.query_norm, rules.key_norm = norm_struct(norms.query), norm_struct(norms.key)
        rules.query_stride, rules.key_stride = _head_stride(norms.query), _head_stride(norms.key)
        rules.spans_heads, rules.is_after_rope = norms.spans_heads, norms.is_after_rope
    return rules


def scoring(spec: AttentionSpec) -> Structure:
    """Build the struct of the rules by which scores become weights; the window is in the attention plan."""
    num_distances = 0 if spec.bias is None else spec.bias.shape[1]
    return c.Scoring(spec.scale, spec.softcap, _floats(spec.sinks), _floats(spec.bias), num_distances)


def attention_struct(weights: AttentionWeights) -> Structure:
    """Build the struct of a layer's attention."""
    return c.Attention(
        qkv=linear_struct(weights.qkv),
        output=linear_struct(weights.output),
        rules=head_rules(weights.head_norms, weights.rotary),
        scoring=scoring(weights.spec),
        window=weights.spec.window or 0,
        group=weights.group,
        cache_layer=weights.cache_layer,
        input_scale=weights.input_scale,
        output_scale=weights.output_scale,
        has_gates=weights.has_gates,
    )


def routing_struct(routing: Routing, num_experts: int) -> Structure:
    """Build the struct of the rules by which experts are chosen."""
    return c.Routing(
        score=c.SCORES[routing.score],
        sums_two_best=routing.group_score == "top2",
        is_normalized=routing.is_normalized,
        scale=routing.scale,
        choice_bias=_floats(routing.choice_bias),
        expert_scales=_floats(routing.expert_scales),
        num_experts=num_experts,
        top_k=routing.top_k,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
    )


def linear_struct(packed: PackedLinear) -> Structure:
    """Return the struct of a linear layer that the C kernels' Ops have packed."""
    struct = getattr(packed, "struct", None)
    assert isinstance(struct, c.Linear), "packed by the same Ops"
    return struct


def _head_stride(norm: Norm) -> int:
    """Return the distance between the weights of two heads, 0 if they are shared."""
    weight = norm.weight if norm.weight is not None else norm.bias
    return weight.shape[1] if weight is not None and weight.dim() == 2 else 0


def _floats(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor.data_ptr()
