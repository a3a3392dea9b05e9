"""Cross attention within the one call of a decoder is that of its operations, for every instruction level that this
machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.tests.kernels.cpu.levels import check
from tokenloom.tests.support.today import some
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint
from tokenloom.tests.workers.models.test_decoder import schedule
from tokenloom.tests.workers.models.test_whisper import ClipRun, clips_of, load_decoder

LENGTHS = {"a": 30, "b": 2, "c": 9}


@pytest.mark.parametrize("stored", some([None, torch.int8, torch.uint8], 2))
def test_one_call_equals_the_operations(ops: CpuOps, stored: torch.dtype | None, tmp_path: Path) -> None:
    folder = whisper_checkpoint(tmp_path, ops.dtype, decoder_layers=2)
    config, clips = load_model_config(folder), clips_of(folder, LENGTHS)
    assert config.cross is not None
    for clip in clips.values():
        clip.rows = clip.rows.to(ops.dtype)
    model = load_decoder(folder, ops, dtype=ops.dtype)
    assert model.is_fused
    run = ClipRun(model, config.cross, clips, stored=stored)
    steps = schedule({name: run.cross.num_tokens + length for name, length in LENGTHS.items()}, seed=1)
    answers = run.run(steps)
    model._fused = None
    for name, wanted in ClipRun(model, config.cross, clips, stored=stored).run(steps).items():
        is_rounded = ops.dtype == torch.bfloat16
        check(answers[name], wanted.float(), atol=(0.03 if is_rounded else 1e-5) * wanted.abs().max().item())
