"""Given embeddings for audio, logits of each family that hears equal those of transformers, under any schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom.ipc.models.audio_families import AUDIO_FAMILIES
from tokenloom.tests.support.checkpoints import ENCODER_DECODERS, tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS, HEARING
from tokenloom.tests.support.today import some_pairs
from tokenloom.tests.workers.models.test_seeing_families import OPS, Grids, check
from tokenloom.tests.workers.paged_run import PagedRun, load
from tokenloom.tests.workers.threaded_group import run_ranks

LENGTHS: dict[str, Grids] = {"a": [(1, 6), (1, 25)], "b": [(1, 40)], "c": [], "d": [(1, 1), (1, 13), (1, 2)]}


@pytest.mark.parametrize(("family", "ops"), some_pairs(HEARING, OPS, every=2))
def test_logits_with_audio_equal_those_of_transformers(family: str, ops: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    for seed in range(2):
        check(family, folder, OPS[ops], seed, grids=LENGTHS)


@pytest.mark.parametrize("family", ["qwen3_asr"])
def test_two_ranks_give_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    run_ranks(2, lambda group: check(family, folder, None, 0, group, LENGTHS))


OLD_TO_NEW = {  # prefixes of tensors' names in older and in newer files
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "audio_tower.": "model.audio_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


@pytest.mark.parametrize("family", HEARING)
def test_both_layouts_of_names_load(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    before = PagedRun(load(folder), 8).step({"a": [3, 1, 4]})["a"]
    tensors = load_file(folder / "model.safetensors")
    moves = OLD_TO_NEW if "audio_tower.conv1.bias" in tensors else {new: old for old, new in OLD_TO_NEW.items()}
    moved = {}
    for name, tensor in tensors.items():
        (start,) = [each for each in moves if name.startswith(each)]
        moved[moves[start] + name.removeprefix(start)] = tensor
    save_file(moved, folder / "model.safetensors")
    assert torch.equal(PagedRun(load(folder), 8).step({"a": [3, 1, 4]})["a"], before)


def test_these_are_all_families_that_hear() -> None:
    hearing = {family for family, config in CONFIGS.items() if config["architectures"][0] in AUDIO_FAMILIES}
    assert hearing == set(HEARING)
    assert len(hearing) + len(ENCODER_DECODERS) == len(AUDIO_FAMILIES)
