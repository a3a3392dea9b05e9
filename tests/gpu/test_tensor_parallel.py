"""On two GPUs a rank's NCCL calls are part of its graphs: greedy answers are transformers', as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom import LLM
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.oracle import GreedyOracle
from tokenloom.tests.system.test_parity import VOCAB_SIZE, check_all, make_prompts, serve_staggered

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_greedy_on_two_gpus_is_transformers(options: dict[str, object], device: torch.device, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    folder = tiny_checkpoint(tmp_path / "model", "qwen3", vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    prompts = make_prompts(SIZES.num_prompts, SIZES.longest_prompt // 2, seed=5)
    options = {"device": device.type, "tensor_parallel_size": 2, "dtype": "float32", **SIZES.limits, **options}
    with LLM(folder, max_model_len=SIZES.max_model_len, **options) as llm:
        outputs = serve_staggered(llm, prompts, SIZES.num_answered)
    check_all(GreedyOracle(folder), prompts, outputs, SIZES.num_answered)
