"""States of the residual stream that a step keeps are the inputs of transformers' layers, by kernels and in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tokenloom.kernels.contract import AuxStates, CacheGroup
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import CPU, load, make_metadata
from tokenloom.tests.workers.state_tables import StateTables
from tokenloom.workers.step.model_step import StepContext

# Norms before layers, behind outputs, of sums; parallel parts; scaled outputs; layers that keep a state.
FAMILIES = ["gemma2", *some(["llama", "olmo2", "cohere", "granite", "qwen3_5"], 2)]
NUM_TOKENS = 37


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ops", [None, ReferenceOps()], ids=["kernels", "torch"])
def test_kept_states_are_the_inputs_of_the_layers(family: str, ops: Ops | None, tmp_path: Path) -> None:
    if family == "qwen3_5":
        folder = recurrent_checkpoint(tmp_path / "m", family)
    else:
        folder = tiny_checkpoint(tmp_path / "m", family, seed=1)
    token_ids = torch.arange(NUM_TOKENS) * 7 % 200
    expected = states_of(folder, token_ids)
    model = load(folder, ops=ops)
    (spec,) = model.kv_cache_specs(8, torch.float32)
    cache = torch.zeros(spec.shape(9))
    states = None
    if model.state_spec is not None:
        states = StateTables(model.state_spec, 8, CPU).step([("a", 0, NUM_TOKENS)])
    depths = [0, 1, len(expected) - 1]
    aux = AuxStates(depths, torch.empty(NUM_TOKENS, 3 * expected[0].shape[1]))
    metadata = make_metadata([(0, NUM_TOKENS, [3, 1, 2, 5, 4])], 8)
    with torch.inference_mode():
        model.forward_logits(token_ids, torch.arange(1), StepContext([CacheGroup(cache, metadata)], states, aux=aux))
    wanted = torch.cat([expected[depth] for depth in depths], dim=1)
    torch.testing.assert_close(aux.out, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0)


@torch.inference_mode()
def states_of(folder: Path, token_ids: Tensor) -> list[Tensor]:
    """Return the inputs [T, hidden_size] of each layer, and of the norm behind the last."""
    load_theirs: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load_theirs(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: list[Tensor] = []
    for part in (*model.model.layers, model.model.norm):
        part.register_forward_pre_hook(lambda _, args: found.append(args[0][0].clone()))
    model(token_ids[None])
    return found
