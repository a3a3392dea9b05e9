"""Shards of a borrowed model's linear layers and experts, by the tensor-parallel plan that transformers has for it.

A plan assigns styles to patterns of module names. Layers without a style, and those with a style in WHOLE, are
replicated on each rank. A column-parallel layer shards its outputs; a row-parallel layer shards its inputs, and the
ranks' results are summed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..machine.parallel import ParallelGroup
from .attention import Unserved

# Styles that change nothing in a forward pass, and those of embeddings, which every rank holds completely.
WHOLE = frozenset(
    ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "embedding_rowwise", "embedding_colwise")
)
COLUMNS = {
    "colwise": False,
    "colwise_gather_output": True,
    "colwise_rep": True,
}  # by style: whether the ranks' outputs are concatenated
ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}  # whether each rank gets all inputs
EXPERTS = "moe_tp_experts"  # style of modules whose parameters have styles of their own
EXPERT_AXES = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}  # axis of [E, out, in], parts along it


@dataclass(frozen=True)
class Split:
    """The way in which ranks share a linear layer."""

    group: ParallelGroup
    columns: slice | None = None  # this rank's part of the inputs; None: the layer is given this part only
    is_summed: bool = False  # whether outputs are summed over the ranks
    is_joined: bool = False  # whether the outputs of all ranks are concatenated, in the order of ranks

    def enter(self, x: Tensor) -> Tensor:
        return x if self.columns is None else x[..., self.columns]

    def leave(self, output: Tensor) -> Tensor:
        if self.is_summed:
            return self.group.all_reduce(output)
        return self.group.gather_everywhere(output) if self.is_joined else output

    @property
    def is_local(self) -> bool:
        """Whether the layer neither cuts its inputs nor concatenates the outputs of all ranks."""
        return self.columns is None and not self.is_joined


class ShardedLinear(nn.Linear):
    """This rank's part of a linear layer; used until the part is packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, split: Split) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.split = split
        self.whole: Tensor | None = None  # the complete matrix, if an embedding may share it

    def forward(self, x: Tensor) -> Tensor:
        return self.split.leave(super().forward(self.split.enter(x)))


def shard_model(model: PreTrainedModel, group: ParallelGroup) -> None:
    """Reduce the complete `model` to this rank's part, in place. Raises Unserved if it cannot be sharded."""
    if group.size == 1:
        return
    if not model.config.get_text_config(decoder=True).base_model_tp_plan:
        raise Unserved(f"transformers has no plan to shard it: leave --tensor-parallel-size {group.size} out")
    plan = dict(model.tp_plan)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in [each for each in model.named_modules() if each[0]]:
        style = plan.get(re.sub(r"\d+", "*", name))
        if style is None or style in WHOLE:
            continue
        if style == EXPERTS:
            _shard_experts(name, module, plan, group)
            continue
        if type(module) is not nn.Linear or style not in (*COLUMNS, *ROWS):
            raise Unserved(
                f"its tensor-parallel plan makes {name}, a {type(module).__name__}, {style}, which is unknown"
            )
        parent, _, child = name.rpartition(".")
        sharded = _columns(module, style, group) if style in COLUMNS else _rows(module, style, group)
        if sharded is None:
            continue
        if module is head:
            sharded.whole = module.weight
        setattr(model.get_submodule(parent), child, sharded)


def _columns(linear: nn.Linear, style: str, group: ParallelGroup) -> ShardedLinear | None:
    """Return this rank's shard of a column-parallel layer. None if the ranks' outputs are to be concatenated and their
    number is not a multiple of the group size: the layer is then replicated."""
    if COLUMNS[style] and linear.out_features % group.size:
        return None
    own = _slice(linear.out_features, "outputs of a layer", group)
    bias = None if linear.bias is None else linear.bias.detach()[own].clone()
    return ShardedLinear(linear.weight.detach()[own].clone(), bias, Split(group, is_joined=COLUMNS[style]))


def _rows(linear: nn.Linear, style: str, group: ParallelGroup) -> ShardedLinear | None:
    """Return this rank's shard of a row-parallel layer. None if every rank gets all inputs and their number is not a
    multiple of the group size: the layer is then replicated."""
    if ROWS[style] and linear.in_features % group.size:
        return None
    own = _slice(linear.in_features, "inputs of a layer", group)
    bias = None
    if linear.bias is not None:  # must be added to the sum only once
        bias = linear.bias.detach().clone() if group.rank == 0 else torch.zeros_like(linear.bias)
    split = Split(group, own if ROWS[style] else None, is_summed=True)
    return ShardedLinear(linear.weight.detach()[:, own].clone(), bias, split)


def _shard_experts(name: str, module: nn.Module, plan: dict[str, str], group: ParallelGroup) -> None:
    """Shard the parameters [E, out, in] of all experts, and make the module sum its output over the ranks. Raises
    Unserved if the plan has another style for a parameter."""
    for own, parameter in list(module.named_parameters()):
        style = plan.get(re.sub(r"\d+", "*", f"{name}.{own}"))
        if style not in EXPERT_AXES or parameter.dim() != 3:
            raise Unserved(f"its tensor-parallel plan makes {name}.{own} {style}, which is unknown")
        axis, num_parts = EXPERT_AXES[style]
        parts = parameter.detach().chunk(num_parts, dim=axis)
        place = _slice(parts[0].shape[axis], "elements of the experts", group)
        kept = torch.cat([part.narrow(axis, place.start, place.stop - place.start) for part in parts], dim=axis)
        parameter.data = kept.contiguous()
    compute: Callable[..., Any] = module.forward
    module.forward = lambda *args, **options: group.all_reduce(compute(*args, **options))


def _slice(total: int, unit: str, group: ParallelGroup) -> slice:
    own = group.shard(total, unit)
    return slice(own.start, own.stop)
