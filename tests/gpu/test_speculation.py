"""On a GPU: drafts change no token and no bit of a logprob, beside graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom import SamplingParams
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.system.sampling_engine import sampling_checkpoint
from tokenloom.tests.system.test_speculation import drafts_without_effect

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_logprobs", [None, 3])
def test_drafts_change_no_token(
    num_logprobs: int | None, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sampling_checkpoint(tmp_path / "model")
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=20, logprobs=num_logprobs, ignore_eos=True)
        for i in range(4)
    ]
    options = {**SIZES.limits, "device": device.type, "dtype": "float32", "deterministic": True}
    options |= {"num_kv_blocks": 256, "max_num_seqs": 4}
    drafted, accepted = drafts_without_effect(folder, params, tmp_path, monkeypatch, **options)
    assert drafted > accepted > 10
