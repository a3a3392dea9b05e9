"""Each native family has the reference's logits in Triton, and a step of any launches kernels where one is faster.

In the interpreter; the reference is compared with transformers in tests/workers/models. Tolerance: 1e-5 of the largest
logit, in float32.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tokenloom.tests.kernels.gpu.interpreter  # noqa: F401
from tokenloom.ipc.spec.models.model_file import NATIVE
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.device.fake_device import Launches, NoWaiting
from tokenloom.tests.workers.paged_run import PagedRun, load
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.step.model_step import StepContext

TOLERANCE = 1e-5
FAMILIES = sorted(family for family, config in CONFIGS.items() if config["architectures"][0] in NATIVE)
PROMPTS, DECODED = {"a": list(range(7, 16)), "b": [3]}, {"a": [5], "b": [9]}
IN_TORCH = {  # scales, soft caps and positions of the model; shared experts
    *("mul", "mul_", "add", "add_", "tanh", "clone", "index", "sigmoid", "div"),
    *("index_select", "linear", "copy_", "as_strided"),
}


class WatchedModel:
    """The model; counts the launches of a decode step, which must not wait for a device."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.kv_cache_specs, self.state_spec = model.kv_cache_specs, model.state_spec
        self.counts: Counter[str] = Counter()

    def forward_logits(self, token_ids: Tensor, logits_indices: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        if context.metadata.num_decode_rows < len(context.metadata.seq_lens_host):
            return self._model.forward_logits(token_ids, logits_indices, context)
        with Launches() as launches, NoWaiting():
            result = self._model.forward_logits(token_ids, logits_indices, context)
        self.counts += launches.counts
        return result


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_a_family_has_the_references_logits_and_launches_kernels(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    watched = WatchedModel(load(folder, max_model_len=128, ops=TritonOps(90)))
    runs = PagedRun(watched, 8), PagedRun(load(folder, max_model_len=128, ops=ReferenceOps()), 8)
    for tokens in (PROMPTS, DECODED):
        found, wanted = (run.step(tokens) for run in runs)
        for name in tokens:
            tolerance = TOLERANCE * float(wanted[name].abs().max())
            torch.testing.assert_close(found[name], wanted[name], atol=tolerance, rtol=0)
    in_torch = {name for name in watched.counts if not name.endswith("_kernel")}
    assert in_torch <= IN_TORCH, in_torch - IN_TORCH
