"""On a GPU: drafts change no token and no bit of a logprob, beside graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom import SamplingParams
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.system import recorded_drafts
from tokenloom.tests.system.sampling_engine import VOCAB_SIZE, make_prompts, open_llm, sampling_checkpoint
from tokenloom.tests.system.test_speculation import num_drafts

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
    prompts = make_prompts(4, 5)
    options = {**SIZES.limits, "device": device.type, "dtype": "float32", "deterministic": True}
    options |= {"num_kv_blocks": 256, "max_num_seqs": 4}
    with open_llm(folder, **options, speculation="off") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    recorded_drafts.record(tmp_path / "record", "mixed", VOCAB_SIZE, expected, params)
    recorded_drafts.use(monkeypatch, tmp_path / "record")
    with open_llm(folder, **options) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    for mine, other in zip(expected, found, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].logprobs == other.outputs[0].logprobs
    drafted, accepted = num_drafts(found)
    assert drafted > accepted > 10
