"""The engine in its processes with a worker on the GPU: memory, sampling, the loss of the worker."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.support.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [f"The capital of {country} is" for country in ("France", "Japan", "Kenya", "Peru", "Norway", "India")]
GREEDY = SamplingParams(temperature=0, max_tokens=SIZES.num_continued, ignore_eos=True)
LIMITS: dict[str, Any] = SIZES.process_limits
MODULE = "tokenloom.workers.process"


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def worker_pids() -> set[int]:
    """The workers below this process, by the title that they took or the module that they run."""
    lines = {each.pid: " ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)}
    return {pid for pid, line in lines.items() if line.startswith("tokenloom worker") or f"-m {MODULE}" in line}


@pytest.fixture(scope="module")
def calm_answers(device: torch.device) -> list[list[int]]:
    with LLM(device=device.type, dtype="float32", in_process=True, num_kv_blocks=512, **LIMITS) as llm:
        return token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_pool_is_measured_and_answers_are_those_of_one_process(
    device: torch.device, calm_answers: list[list[int]]
) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    with LLM(device=device.type, dtype="float32", gpu_memory_utilization=0.3, **LIMITS) as llm:
        info = llm.info()
        assert info.device == "cuda" and info.num_kv_blocks > 2
        free, _ = torch.cuda.mem_get_info(device)
        assert free > 0.6 * total, (
            f"{(total - free) / 2**30:.1f} GiB are in use, 0.3 of {total / 2**30:.1f} was allowed"
        )
        answers = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text.startswith(" Paris")
    assert answers == calm_answers


def test_the_cache_fills_its_share_and_the_largest_steps_fit_beside_it(device: torch.device, tmp_path: Path) -> None:
    """Within 2 % of the device; prompts, batches and logprobs at the configured limits then take no more."""
    heads = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = tiny_checkpoint(tmp_path, "qwen3", max_position_embeddings=SIZES.pool_model_len, **heads)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    utilization = (total - free + min(SIZES.memory_bytes, free // 2)) / total
    num_seqs, num_tokens = SIZES.pool_limits
    limits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens, "max_logprobs": 20}
    rng = random.Random(0)
    with LLM(folder, in_process=True, device=device.type, gpu_memory_utilization=utilization, **limits) as llm:
        assert abs(1 - torch.cuda.mem_get_info(device)[0] / total - utilization) <= 0.02
        for num_rows, longest in SIZES.pool_steps:
            prompts = [[rng.randrange(200) for _ in range(rng.randint(1, longest))] for _ in range(num_rows - 1)]
            prompts.append([7] * longest)
            ask_all = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1, logprobs=20, max_tokens=3)
            drawn = SamplingParams(
                temperature=1.0, top_p=0.9, seed=1, max_tokens=3, prompt_logprobs=rng.choice([None, 5])
            )
            params = [rng.choice([ask_all, drawn, GREEDY]) for _ in prompts]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert all(output.finished for output in outputs)
            assert 1 - torch.cuda.mem_get_info(device)[0] / total <= utilization + 0.02


def test_a_killed_worker_loses_no_request(device: torch.device, calm_answers: list[list[int]]) -> None:
    with LLM(device=device.type, dtype="float32", num_kv_blocks=512, **LIMITS | {"max_num_seqs": 2}) as llm:
        futures = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]  # two run at a time
        assert futures[0].result(timeout=60).finished
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)
        answers = token_ids([future.result(timeout=120) for future in futures])
        assert worker_pids() != {pid}
        assert llm.health().num_restarts >= 1
    assert answers == calm_answers
