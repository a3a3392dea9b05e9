"""On a GPU, too, greedy answers are transformers', token for token in fp32; in bf16 they stay near."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom import LLM, SamplingParams
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.oracle import GreedyOracle
from tokenloom.tests.system.test_parity import (
    BLOCK_SIZES,
    SHAPES,
    VOCAB_SIZE,
    WITH_EXPERTS,
    check_all,
    make_prompts,
    serve_staggered,
)

pytestmark = pytest.mark.gpu

BF16_TOLERANCE = 0.5  # log probability by which the first other token may miss

SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    "preempted": {"max_num_seqs": 24, "max_num_batched_tokens": 256},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: tiny_checkpoint(root / family, family, vocab_size=VOCAB_SIZE, num_hidden_layers=2, **shape)
        for family, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def oracles(folders: dict[str, Path]) -> dict[str, GreedyOracle]:
    return {family: GreedyOracle(folder) for family, folder in folders.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", SHAPES)
def test_greedy_on_a_gpu_is_transformers_under_every_schedule(
    family: str, schedule: str, device: torch.device, folders: dict[str, Path], oracles: dict[str, GreedyOracle]
) -> None:
    block_size = min(BLOCK_SIZES[family], SIZES.largest_block)
    options = {**SIZES.limits, "block_size": block_size, "num_kv_blocks": 4096, **SCHEDULES[schedule]}
    if schedule == "preempted":
        options["num_kv_blocks"] = SIZES.num_spare_blocks + SIZES.max_model_len // block_size
    prompts = make_prompts(SIZES.num_prompts, SIZES.longest_prompt, seed=len(family))
    with LLM(folders[family], in_process=True, device=device.type, max_model_len=SIZES.max_model_len, **options) as llm:
        if schedule == "preempted":
            params = SamplingParams(temperature=0, max_tokens=SIZES.num_answered, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        else:
            outputs = serve_staggered(llm, prompts, SIZES.num_answered)
    check_all(oracles[family], prompts, outputs, SIZES.num_answered)


@pytest.mark.parametrize("family", [family for family in SHAPES if family not in WITH_EXPERTS])
def test_bf16_on_a_gpu_stays_near_transformers(family: str, device: torch.device, folders: dict[str, Path]) -> None:
    prompts = make_prompts(SIZES.num_prompts // 2, SIZES.longest_prompt // 2, seed=7)
    params = SamplingParams(temperature=0, max_tokens=SIZES.num_answered, ignore_eos=True)
    options = {"device": device.type, "dtype": "bfloat16", "max_model_len": SIZES.max_model_len, **SIZES.limits}
    with LLM(folders[family], in_process=True, num_kv_blocks=1024, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = GreedyOracle(folders[family], torch.bfloat16)
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check_rough(prompt, output.outputs[0].token_ids, BF16_TOLERANCE)
