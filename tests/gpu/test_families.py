"""On a GPU: each family has the logits of plain torch or of transformers on the CPU, in float32.

Chunks, decode steps and both in one; media are given as embeddings. Tolerance: 1e-4 of the largest logit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.spec.models.model_file import NATIVE
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS, HEARING
from tokenloom.tests.support.recurrent_families import RECURRENT
from tokenloom.tests.workers.borrowed import test_model as borrowed
from tokenloom.tests.workers.models import test_seeing_families as seeing
from tokenloom.tests.workers.models.test_decoder import oracle, prompts_of, run_schedule, schedule
from tokenloom.tests.workers.paged_run import PagedRun, load

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4
WITH_MEDIA = (*seeing.FAMILIES, *HEARING)
TEXT = sorted(
    family for family, config in CONFIGS.items() if config["architectures"][0] in NATIVE and family not in WITH_MEDIA
)
STEPS: list[dict[str, list[int]]] = [
    {"a": list(range(7, 20)), "b": [3]},
    {"a": [5], "b": [9]},
    {"a": [8], "b": [21, 4, 30], "c": list(range(40, 49))},
    {"a": [2], "b": [11], "c": [6]},
]
BORROWED = ("gemma3_text", "gpt_oss", *RECURRENT)
LENGTHS = {"a": 23, "b": 1, "c": 9}


@pytest.mark.parametrize("family", TEXT)
def test_a_native_family_has_the_references_logits(family: str, device: torch.device, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    here = PagedRun(load(folder, max_model_len=128, device=device), 8, device=device)
    reference = PagedRun(load(folder, max_model_len=128, ops=ReferenceOps()), 8)
    for tokens in STEPS:
        found, wanted = here.step(tokens), reference.step(tokens)
        for name in tokens:
            bound = TOLERANCE * float(wanted[name].abs().max())
            torch.testing.assert_close(found[name].cpu(), wanted[name], atol=bound, rtol=0)


@pytest.mark.parametrize("family", WITH_MEDIA)
def test_a_family_with_media_has_transformers_logits(family: str, device: torch.device, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    grids: dict[str, seeing.Grids] = {"a": [(2, 3)], "b": [], "c": [(1, 4), (1, 2)]}
    seeing.check(family, folder, None, 0, grids=grids, device=device, tolerance=TOLERANCE)


@pytest.mark.parametrize("family", BORROWED)
def test_borrowed_layers_have_transformers_logits(family: str, device: torch.device, tmp_path: Path) -> None:
    folder, tokens = borrowed.checkpoint(tmp_path, family), prompts_of(LENGTHS, 270, seed=1)
    model = borrowed.load(folder, device=device)
    model.rows.is_stepwise = family in borrowed.STEPWISE
    expected = oracle(folder, tokens)
    actual = run_schedule(PagedRun(model, 4, device=device), tokens, schedule(LENGTHS, seed=3))
    for name in tokens:
        bound = TOLERANCE * max(float(expected[name].abs().max()), 1.0)
        torch.testing.assert_close(actual[name].cpu(), expected[name], atol=bound, rtol=0)
