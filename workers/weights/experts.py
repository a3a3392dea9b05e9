"""Loading of a layer's experts: this rank's shard of each expert's gate_up [2 n, hidden], gates first, and down
[hidden, n]. Experts without gates, which are stored one by one, have up [n, hidden] in place of gate_up.

Checkpoints store experts in one of four forms, in the block `experts`:

    one by one   N.gate_proj.weight [size, hidden], or other names of TensorNames.expert_matrices
    stacked      gate_up_proj [E, gates | ups, hidden], down_proj [E, hidden, size], or names of expert_stacks
    interleaved  gate_up_proj [E, hidden, 2 size], in which gates and ups alternate, down_proj [E, size, hidden]
    mxfp4        gate_up_proj_blocks [E, 2 size, hidden / 32, 16], interleaved, down_proj_blocks [E, hidden, size / 32,
                 16], and for each blocks [..., 16] scales [...]

Knows no router and no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ...kernels.quantized import Weight
from .checkpoint import Checkpoint, TensorSlice
from .experts_shard import ExpertsShard
from .loader import reordered
from .mxfp4 import GROUP_SIZE, as_codes, dequantize
from .quantized_weights import load_matrix, quantize_on_load

Matrices: TypeAlias = tuple[list[Weight], list[Weight]]  # gate_up and down of each expert


def load_experts(checkpoint: Checkpoint, shard: ExpertsShard, *, keeps_mxfp4: bool = False) -> Matrices:
    """Read this rank's n elements of each expert's inner size; return each expert's gate_up and down. `keeps_mxfp4`:
    keep MXFP4 as codes, except in `down` if the shard starts or ends inside a group."""
    if f"{shard.path}.gate_up_proj_blocks" in checkpoint:
        return _load_mxfp4(checkpoint, shard, keeps_mxfp4)
    if shard.stacks[0] not in checkpoint:
        return _load_each(checkpoint, shard)
    load = _load_interleaved if shard.names.are_experts_interleaved else _load_stacked
    gate_up, down = load(checkpoint, shard)
    return [quantize_on_load(checkpoint, w) for w in gate_up], [quantize_on_load(checkpoint, w) for w in down]


def load_expert_biases(checkpoint: Checkpoint, shard: ExpertsShard) -> tuple[Tensor, Tensor]:
    """Return the biases of all experts: those of gate_up [E, 2 n] and those of down [E, hidden]."""
    path, num_experts, size = shard.path, shard.config.num_experts, shard.config.intermediate_size
    down = checkpoint.load(TensorSlice(f"{path}.down_proj_bias", (num_experts, shard.hidden_size)))
    if f"{path}.gate_proj_bias" in checkpoint:  # GGUF files have gates and ups in separate tensors
        names = (f"{path}.{name}_proj_bias" for name in ("gate", "up"))
        halves = (TensorSlice(name, (num_experts, size), 1, shard.inner) for name in names)
        return torch.cat([checkpoint.load(half) for half in halves], dim=1), down
    assert shard.names.are_experts_interleaved
    wanted = TensorSlice(f"{path}.gate_up_proj_bias", (num_experts, 2 * size), 1, _both(shard.inner))
    return _separated(checkpoint.load(wanted), 1), down


def _load_each(checkpoint: Checkpoint, shard: ExpertsShard) -> Matrices:
    gate, up, down = shard.names.expert_matrices
    hidden_size, size, numbers = shard.hidden_size, shard.config.intermediate_size, range(shard.config.num_experts)

    def load(expert: int, axis: int, shape: tuple[int, int], *matrices: str) -> Weight:
        names = (f"{shard.path}.{expert}.{matrix}.weight" for matrix in matrices)
        return load_matrix(checkpoint, *(TensorSlice(name, shape, axis, shard.inner) for name in names))

    ups = (gate, up) if shard.config.activation.is_gated else (up,)
    gate_up = [load(expert, 0, (size, hidden_size), *ups) for expert in numbers]
    return gate_up, [load(expert, 1, (hidden_size, size), down) for expert in numbers]


def _load_stacked(checkpoint: Checkpoint, shard: ExpertsShard) -> tuple[Tensor, Tensor]:
    num_experts, size = shard.config.num_experts, shard.config.intermediate_size
    shape = (num_experts, 2 * size, shard.hidden_size)
    parts = _halves(shard.inner, size)
    halves = [checkpoint.load(TensorSlice(shard.stacks[0], shape, 1, part)) for part in parts]
    down = checkpoint.load(TensorSlice(shard.stacks[1], (num_experts, shard.hidden_size, size), 2, shard.inner))
    return torch.cat(halves, dim=1), down


def _load_interleaved(checkpoint: Checkpoint, shard: ExpertsShard) -> tuple[Tensor, Tensor]:
    num_experts, size = shard.config.num_experts, shard.config.intermediate_size
    shape = (num_experts, shard.hidden_size, 2 * size)
    gate_up = checkpoint.load(TensorSlice(shard.stacks[0], shape, 2, _both(shard.inner)))
    down = checkpoint.load(TensorSlice(shard.stacks[1], (num_experts, size, shard.hidden_size), 1, shard.inner))
    return _separated(gate_up, 2).transpose(1, 2), down.transpose(1, 2)


def _load_mxfp4(checkpoint: Checkpoint, shard: ExpertsShard, keeps_codes: bool) -> Matrices:
    num_experts, size, inner = shard.config.num_experts, shard.config.intermediate_size, shard.inner
    is_cut = inner.start % GROUP_SIZE or inner.stop % GROUP_SIZE
    groups = range(inner.start // GROUP_SIZE, -(-inner.stop // GROUP_SIZE))  # groups that contain inputs of the shard
    start = inner.start - groups.start * GROUP_SIZE

    def load(name: str, num_outputs: int, num_inputs: int, axis: int, part: range) -> Callable[[int], Weight]:
        shape = (num_experts, num_outputs, num_inputs // GROUP_SIZE)
        blocks, scales = (
            checkpoint.load_stored(TensorSlice(f"{shard.path}.{name}_{suffix}", each, axis, part), ("U8",))
            for suffix, each in (("blocks", (*shape, GROUP_SIZE // 2)), ("scales", shape))
        )
        read = as_codes if keeps_codes and not (is_cut and axis == 2) else dequantize
        return lambda expert: read(blocks[expert], scales[expert], checkpoint.dtype)

    gate_up = load("gate_up_proj", 2 * size, shard.hidden_size, 1, _both(inner))
    down = load("down_proj", shard.hidden_size, size, 2, groups)
    # one expert at a time, since floats take four times the memory of codes
    order = _separated(torch.arange(2 * len(inner), device=checkpoint.device), 0)
    downs = (down(expert) for expert in range(num_experts))
    return (
        [reordered(gate_up(expert), order) for expert in range(num_experts)],
        [each[:, start : start + len(inner)] if isinstance(each, Tensor) else each for each in downs],
    )


def _halves(shard: range, size: int) -> list[range]:
    """Return the indices of the shard's gates and of its ups, in a matrix in which the ups follow all gates."""
    return [shard, range(size + shard.start, size + shard.stop)]


def _both(shard: range) -> range:
    """Return the indices of the shard's gates and ups, in a matrix in which they alternate."""
    return range(2 * shard.start, 2 * shard.stop)


def _separated(alternating: Tensor, axis: int) -> Tensor:
    """Return a tensor in which gates and ups alternate along the axis, reordered to gates | ups."""
    places = torch.arange(alternating.shape[axis], device=alternating.device)
    return alternating.index_select(axis, torch.cat((places[::2], places[1::2])))
