"""Random decoders of the kernels' contract, and their computation one operation after another.

Each tensor is drawn from its name, so that decoders that differ in one field share all others.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokenloom.kernels.contract import (
    GATED_SILU,
    NO_ACTIVATION,
    Activation,
    AttentionMetadata,
    AttentionSpec,
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    HeadNorms,
    LayerWeights,
    MLPWeights,
    Norm,
    NormKind,
    PackedLinear,
    Rotary,
    Routing,
    ScoreKind,
)
from tokenloom.kernels.reference import ReferenceOps

NUM_IDS, NUM_POSITIONS = 50, 400
SHARED_SIZE = 30


@dataclass(frozen=True)
class ExpertFields:
    """Fields of layers with experts; each is an MLP of the layer's inner size."""

    num_experts: int = 9
    top_k: int = 3
    score: ScoreKind = "softmax"
    has_choice_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    is_normalized: bool = False
    scale: float = 1.0
    has_expert_scales: bool = False
    shared: Literal["none", "plain", "gated"] = "none"


@dataclass(frozen=True)
class Fields:
    """Fields of a random decoder; those of layers are the same in both layers unless stated otherwise."""

    hidden_size: int = 40
    inner_sizes: tuple[int, int] = (50, 50)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    norm: NormKind = "rms"
    has_norm_weight: bool = True
    has_norm_bias: bool = False
    order: Literal["pre", "post", "sandwich", "parallel", "parallel with two norms"] = "pre"
    head_norms: Literal["none", "shared", "per head", "spanning"] = "none"
    head_norm: NormKind = "rms"
    has_head_bias: bool = False
    is_after_rope: bool = False
    rotated: tuple[int, int] = (24, 24)  # elements of a head in each layer
    has_query_scale: bool = False
    scales: tuple[float, float] = (0.2, 0.2)  # of attention in each layer
    windows: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    has_sinks: bool = False
    has_position_bias: bool = False
    qkv_clip: float = 0.0
    activation: Activation = GATED_SILU
    experts: ExpertFields | None = None  # in the second layer
    has_bias: bool = False
    is_tied: bool = False
    has_positions: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0


def draw(name: str, *shape: int, deviation: float = 1.0) -> Tensor:
    """Draw numbers that bf16 represents."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * deviation).bfloat16().float()


class Builder:
    """Makes the weights of a decoder for some operations and element type."""

    def __init__(self, fields: Fields, ops: ReferenceOps, dtype: torch.dtype) -> None:
        self.fields, self.ops, self.dtype = fields, ops, dtype

    def decoder(self) -> DecoderWeights:
        f = self.fields
        table = draw("table", NUM_IDS, f.hidden_size).to(self.dtype)
        head = self.linear("head", f.hidden_size, NUM_IDS) if not f.is_tied else self.ops.pack_linear(table, None)
        positions = draw("positions", NUM_POSITIONS, f.hidden_size).to(self.dtype)
        return DecoderWeights(
            table=head if f.is_tied else table,
            positions=positions if f.has_positions else None,
            embedding_scale=f.embedding_scale,
            layers=[self.layer(index) for index in range(2)],
            residual_scale=f.residual_scale,
            norm=self.norm("final"),
            head=head,
            logit_scale=f.logit_scale,
            logit_softcap=f.logit_softcap,
            num_heads=f.num_heads,
            num_kv_heads=f.num_kv_heads,
            head_dim=f.head_dim,
        )

    def layer(self, index: int) -> LayerWeights:
        f = self.fields
        num_all, num_queries = (f.num_heads + 2 * f.num_kv_heads) * f.head_dim, f.num_heads * f.head_dim
        clip = Activation("clamp", limit=f.qkv_clip) if f.qkv_clip else NO_ACTIVATION
        has_input = f.order != "post"
        has_mlp = f.order in ("pre", "sandwich", "parallel with two norms")
        has_outputs = f.order in ("post", "sandwich")
        return LayerWeights(
            input_norm=self.norm(f"input {index}") if has_input else None,
            attention=AttentionWeights(
                qkv=self.linear(f"qkv {index}", f.hidden_size, num_all, clip),
                head_norms=self.heads(index),
                rotary=self.rotary(index),
                spec=AttentionSpec(
                    f.scales[index],
                    f.windows[index],
                    f.softcap,
                    draw(f"sinks {index}", f.num_heads) + 1 if f.has_sinks else None,
                    draw("position bias", f.num_heads, 2 * NUM_POSITIONS - 1) if f.has_position_bias else None,
                ),
                output=self.linear(f"output {index}", num_queries, f.hidden_size),
                cache_layer=index,
            ),
            mixer_output_norm=self.norm(f"attention output {index}") if has_outputs else None,
            mlp_norm=self.norm(f"mlp {index}") if has_mlp else None,
            mlp=self.experts() if f.experts and index else self.mlp(f"{index}", f.inner_sizes[index]),
            mlp_output_norm=self.norm(f"mlp output {index}") if has_outputs else None,
            is_parallel=f.order.startswith("parallel"),
        )

    def mlp(self, name: str, inner: int) -> MLPWeights:
        f = self.fields
        up = self.linear(f"up {name}", f.hidden_size, inner * (1 + f.activation.is_gated), f.activation)
        return MLPWeights(up, self.linear(f"down {name}", inner, f.hidden_size))

    def experts(self) -> ExpertsWeights:
        f, e = self.fields, self.fields.experts
        assert e is not None
        inner, numbers = f.inner_sizes[1], range(e.num_experts)
        num_ups = inner * (1 + f.activation.is_gated)
        gate_up = [self.matrix(f"gate_up {expert}", f.hidden_size, num_ups) for expert in numbers]
        down = [self.matrix(f"down of {expert}", inner, f.hidden_size) for expert in numbers]
        biases = draw("gate_up biases", e.num_experts, num_ups), draw("down biases", e.num_experts, f.hidden_size)
        routing = Routing(
            e.top_k,
            e.score,
            draw("choice bias", e.num_experts, deviation=0.3) if e.has_choice_bias else None,
            e.num_groups,
            e.top_groups,
            e.group_score,
            e.is_normalized,
            e.scale,
            1 + draw("expert scales", e.num_experts).abs() if e.has_expert_scales else None,
        )
        return ExpertsWeights(
            self.linear("router", f.hidden_size, e.num_experts),
            routing,
            self.ops.pack_experts(
                gate_up,
                down,
                (biases[0].to(self.dtype), biases[1].to(self.dtype)) if f.has_bias else None,
                f.activation,
            ),
            None if e.shared == "none" else self.mlp("shared", SHARED_SIZE),
            self.linear("shared gate", f.hidden_size, 1) if e.shared == "gated" else None,
        )

    def linear(self, name: str, inputs: int, outputs: int, activation: Activation = NO_ACTIVATION) -> PackedLinear:
        bias = draw(f"{name} bias", outputs).to(self.dtype) if self.fields.has_bias else None
        return self.ops.pack_linear(self.matrix(name, inputs, outputs), bias, activation)

    def matrix(self, name: str, inputs: int, outputs: int) -> Tensor:
        return draw(name, outputs, inputs, deviation=inputs**-0.5).to(self.dtype)

    def norm(self, name: str) -> Norm:
        f = self.fields
        weight = draw(f"{name} norm", f.hidden_size) if f.has_norm_weight else None
        bias = draw(f"{name} norm bias", f.hidden_size) if f.has_norm_bias and f.norm == "layer" else None
        return Norm(f.norm, weight, bias, 1e-5)

    def heads(self, index: int) -> HeadNorms | None:
        f = self.fields
        if f.head_norms == "none":
            return None

        def norm(name: str, num_heads: int) -> Norm:
            shape = (f.head_dim,) if f.head_norms == "shared" else (num_heads, f.head_dim)
            bias = draw(f"{name} bias {index}", *shape) if f.has_head_bias and f.head_norm == "layer" else None
            return Norm(f.head_norm, draw(f"{name} {index}", *shape), bias, 1e-5)

        norms = norm("query norm", f.num_heads), norm("key norm", f.num_kv_heads)
        return HeadNorms(*norms, f.head_norms == "spanning", f.is_after_rope)

    def rotary(self, index: int) -> Rotary:
        f, rotated = self.fields, self.fields.rotated[index]
        angles = torch.arange(NUM_POSITIONS)[:, None] * 0.6 ** torch.arange(rotated // 2)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotated else None
        return Rotary(cos_sin, 1 + draw("query scale", NUM_POSITIONS).abs() if f.has_query_scale else None)


def run_mlp(ops: ReferenceOps, x: Tensor, weights: MLPWeights | ExpertsWeights) -> Tensor:
    if isinstance(weights, MLPWeights):
        return ops.linear(ops.linear(x, weights.up), weights.down)
    mixed = ops.fused_moe(x, ops.logits(x, weights.router), weights.experts, weights.routing)
    if weights.shared is None:
        return mixed
    shared = run_mlp(ops, x, weights.shared)
    return mixed + (shared if weights.shared_gate is None else shared * ops.linear(x, weights.shared_gate).sigmoid())


def run_layers(
    ops: ReferenceOps,
    weights: DecoderWeights,
    token_ids: Tensor,
    indices: Tensor,
    metadata: AttentionMetadata,
    kv_cache: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the results of a FusedDecoder, one operation after another."""
    x = ops.embedding(token_ids, weights.table, 0) * weights.embedding_scale
    if weights.positions is not None:
        x = x + weights.positions[metadata.positions]

    def norm(x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else ops.norm(x, norm)

    for index, layer in enumerate(weights.layers):

        def attend(x: Tensor, index: int = index, own: AttentionWeights = layer.attention) -> Tensor:
            heads = ops.linear(x, own.qkv).view(len(x), -1, weights.head_dim)
            query = ops.qk_norm_rope_cache(heads, own.head_norms, own.rotary, kv_cache, index, metadata)
            return ops.linear(ops.paged_attention(query, kv_cache, index, metadata, own.spec).flatten(1), own.output)

        normed = norm(x, layer.input_norm)
        if layer.is_parallel:
            mlp_input = normed if layer.mlp_norm is None else ops.norm(x, layer.mlp_norm)
            added = attend(normed) + run_mlp(ops, mlp_input, layer.mlp)
            x = x + added * weights.residual_scale
            continue
        x = x + norm(attend(normed), layer.mixer_output_norm) * weights.residual_scale
        output = run_mlp(ops, norm(x, layer.mlp_norm), layer.mlp)
        x = x + norm(output, layer.mlp_output_norm) * weights.residual_scale
    hidden = ops.norm(x, weights.norm)
    logits = ops.logits(hidden[indices], weights.head) * weights.logit_scale
    cap = weights.logit_softcap
    return hidden, cap * torch.tanh(logits / cap) if cap else logits
