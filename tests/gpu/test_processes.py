"""The engine in its processes with a worker on the GPU: memory, sampling, the loss of the worker."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

from tokenloom import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [f"The capital of {country} is" for country in ("France", "Japan", "Kenya", "Peru", "Norway", "India")]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
MODULE = "tokenloom.workers.process"


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def worker_pids() -> set[int]:
    """The workers below this process, by the title that they took or the module that they run."""
    lines = {each.pid: " ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)}
    return {pid for pid, line in lines.items() if line.startswith("tokenloom worker") or f"-m {MODULE}" in line}


@pytest.fixture(scope="module")
def calm_answers(device: torch.device) -> list[list[int]]:
    with LLM(device=device.type, dtype="float32", in_process=True, num_kv_blocks=512) as llm:
        return token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_pool_is_measured_and_answers_are_those_of_one_process(
    device: torch.device, calm_answers: list[list[int]]
) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    with LLM(device=device.type, dtype="float32", gpu_memory_utilization=0.3) as llm:
        info = llm.info()
        assert info.device == "cuda" and info.num_kv_blocks > 2
        free, _ = torch.cuda.mem_get_info(device)
        assert free > 0.6 * total, (
            f"{(total - free) / 2**30:.1f} GiB are in use, 0.3 of {total / 2**30:.1f} was allowed"
        )
        answers = token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text.startswith(" Paris")
    assert answers == calm_answers


def test_a_killed_worker_loses_no_request(device: torch.device, calm_answers: list[list[int]]) -> None:
    with LLM(device=device.type, dtype="float32", num_kv_blocks=512, max_num_seqs=2) as llm:
        futures = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]  # two run at a time
        assert futures[0].result(timeout=60).finished
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)
        answers = token_ids([future.result(timeout=120) for future in futures])
        assert worker_pids() != {pid}
        assert llm.health().num_restarts >= 1
    assert answers == calm_answers


def test_a_seed_draws_the_same_tokens_on_gpu_and_cpu(device: torch.device) -> None:
    params = [
        SamplingParams(temperature=1.5, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(6)
    ]
    answers = []
    for kind in (device.type, "cpu"):
        with LLM(device=kind, dtype="float32", in_process=True, num_kv_blocks=512) as llm:
            answers.append(token_ids(llm.generate(PROMPTS, params, use_tqdm=False)))
    num_equal = sum(mine == theirs for mine, theirs in zip(*answers, strict=True))
    assert num_equal >= len(PROMPTS) - 1, f"{num_equal} of {len(PROMPTS)} agree; one may differ at a near tie"
