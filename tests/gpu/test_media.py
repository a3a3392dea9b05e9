"""On a GPU: engines answer prompts with images and with audio with transformers' tokens, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.system.media_engine import Checker, make_requests, open_llm, run
from tokenloom.tests.system.media_families import make_models

pytestmark = pytest.mark.gpu

MAX_TOKENS = 6
OPTIONS: dict[str, object] = {"num_kv_blocks": 512, "max_num_batched_tokens": 64, "max_num_seqs": 4}


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_asr", "whisper"])
def test_answers_to_prompts_with_media_are_those_of_transformers(
    family: str, device: torch.device, tmp_path: Path
) -> None:
    models = make_models(tmp_path, family)
    requests = make_requests(models, 5, SIZES.num_media_prompts - 1)[: SIZES.num_media_prompts]
    with open_llm(models, device=device.type, **OPTIONS) as llm:
        outputs = run(llm, models, requests, MAX_TOKENS)
    Checker(models).check(requests, outputs, MAX_TOKENS)
