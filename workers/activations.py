"""The memory of a GPU that the largest steps take beside weights and KV cache."""

from __future__ import annotations

import torch

from ..ipc.spec.config.engine_spec import EngineSpec
from .model_loader import ModelLoader
from .sampling.sampler import Sampler
from .step.model_step import Model
from .step.profile import StepLimits, activation_bytes, largest_steps, with_adapters


def measure_activations(
    spec: EngineSpec, loader: ModelLoader, model: Model, sampler: Sampler | None, device: torch.device
) -> int:
    """Run the largest steps of a model on null blocks; return the bytes that they take, with block tables and recorded
    graphs."""
    config = spec.config
    kv_specs = loader.kv_cache_specs(model)
    has_states = model.state_spec is not None
    steps = largest_steps(
        StepLimits.of(spec),
        config.block_size,
        len(kv_specs),
        has_states=has_states,
        is_encoder=spec.model.is_encoder,
    )
    if config.enable_lora:
        steps = map(with_adapters, steps)
    null_blocks = [each.allocate(1, device) for each in kv_specs]
    states = None
    if model.state_spec is not None:
        states = model.state_spec.view(torch.zeros(model.state_spec.block_bytes, dtype=torch.uint8, device=device))
    measured = activation_bytes(model, steps, null_blocks, sampler, spec.max_logprobs, states)
    shape, max_blocks_per_row = spec.model, spec.max_blocks_per_row
    measured += len(kv_specs) * config.max_num_seqs * max_blocks_per_row * 4  # block tables on the device
    if not loader.has_graphs:
        return measured
    from .device.cuda_graphs import graph_bytes

    return measured + graph_bytes(
        config.max_num_seqs,
        shape.vocab_size,
        shape.num_heads,
        shape.head_dim,
        shape.num_layers,
        max_blocks_per_row,
        num_ranks=config.tensor_parallel_size,
        num_groups=len(kv_specs),
        has_adapters=config.enable_lora,
    )
