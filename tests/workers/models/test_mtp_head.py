"""Logits and states of MTP layers equal those of transformers' layers of the family, which it runs in other models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.spec.config.speculation import DraftSpec
from tokenloom.ipc.spec.config.weight_files import file_by_tensor
from tokenloom.ipc.spec.drafts.mtp_layers import mtp_head
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.tests.support.mtp_layers import FORMS, mtp_checkpoint, mtp_oracle
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_eagle_head import run
from tokenloom.tests.workers.paged_run import CPU, load
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load_head import load_head


@pytest.mark.parametrize("family", some(list(FORMS), 2))
def test_an_mtp_layer_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = mtp_checkpoint(tmp_path / "m", family)
    config = load_model_config(folder)
    layer, head = mtp_head(folder, file_by_tensor(folder), config)
    draft = DraftSpec(folder=str(folder), model=layer, head=head, weights="")
    ops = select_ops(CPU, torch.float32)
    ours = load_head(draft, head, load(folder), 512, torch.float32, CPU, ops, ParallelGroup())
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(45, config.hidden_size, generator=generator)
    token_ids = torch.randint(250, (45,), generator=generator)
    with torch.inference_mode():
        expected = mtp_oracle(folder, family)(states, token_ids)
    for found, wanted in zip(run(ours, states, token_ids, 0), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0)
