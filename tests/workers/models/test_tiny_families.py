"""The logits of the tiny checkpoints vary, and each tensor changes them: a decoder that ignores one is found out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS
from tokenloom.tests.support.family_checkpoints import reference_model

PROMPT = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(3))
TEXT_IGNORES = (
    "audio_tower",
    "vision_tower",
    "multi_modal_projector",
    "embed_vision",
    "visual",
    "vision_model",
    "connector",
)
CONSTANT_SHIFTS = re.compile(r"k_proj\.bias$|beta$|eps$")  # a key's bias adds the same to every score of a query


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(PROMPT).logits[0]
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_differ_between_tokens_and_positions(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    logits = logits_of(reference_model(folder))
    assert logits.std(dim=0).mean() > 0.5
    assert logits.std(dim=1).mean() > 0.5
    assert len(set(logits.argmax(-1).tolist())) >= 5


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONFIGS)
def test_each_tensor_changes_the_logits(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    model = reference_model(folder)
    expected = logits_of(model)
    unmoved = []
    for name, tensor in model.state_dict().items():
        if any(part in name for part in TEXT_IGNORES) or CONSTANT_SHIFTS.search(name):
            continue
        before = tensor.clone()
        tensor.mul_(0.5)
        if (logits_of(model) - expected).abs().max() < 1e-4:
            unmoved.append(name)
        tensor.copy_(before)
    assert not unmoved
