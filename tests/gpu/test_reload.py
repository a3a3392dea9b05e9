"""On a GPU: other weights in place. Recorded graphs hold addresses of the old weights, blocks what those computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.support.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
MAX_NUM_SEQS = 6  # graphs are recorded at the start for 6, 4, 2 and 1


def make_prompts() -> list[list[int]]:
    """No block of one begins another."""
    rng = random.Random(0)
    return [[first, *(rng.randrange(200) for _ in range(length))] for first, length in ((7, 40), (8, 33), (9, 16))]


def answer(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def start(folder: Path, device: torch.device, in_process: bool) -> LLM:
    options: dict[str, object] = {**SIZES.limits, "device": device.type, "dtype": "float32", "deterministic": True}
    options |= {"max_model_len": 128, "num_kv_blocks": 128, "max_num_seqs": MAX_NUM_SEQS, "in_process": in_process}
    return LLM(folder, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[list[int]]]:
    """Answers of engines that were started with one of two checkpoints."""
    answers = {}
    for seed in (1, 2):
        folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=seed)
        with start(folder, device, in_process=True) as llm:
            answers[folder] = tokens(answer(llm, make_prompts()))
    return answers


@pytest.mark.parametrize("in_process", [True, False])
def test_graphs_run_the_weights_that_are_loaded_and_no_prefix_is_of_others(
    in_process: bool, device: torch.device, expected: dict[Path, list[list[int]]]
) -> None:
    one, two = expected
    assert expected[one] != expected[two]
    prompts, sizes = make_prompts(), list[int]()
    with start(one, device, in_process) as llm:
        assert tokens(answer(llm, prompts)) == expected[one]
        whole = tokens(answer(llm, prompts[:1], LONG))[0]
        for folder in (two, one, two):
            llm.reload(folder)
            sizes.append(torch.cuda.memory_allocated(device))
            outputs = answer(llm, prompts)
            assert tokens(outputs) == expected[folder]
            assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
            outputs = answer(llm, prompts)
            assert tokens(outputs) == expected[folder]
            assert all(output.num_cached_tokens for output in outputs)
        assert max(sizes) - min(sizes) < 1 << 18, f"{sizes} bytes after each reload: old weights are held"
        llm.reload(one)
        future = llm.submit(prompts[0], LONG)
        llm.reload(two)
        mixed = future.result(timeout=60).outputs[0].token_ids
        first = next((i for i in range(len(whole)) if mixed[i] != whole[i]), len(whole))  # that `two` chose
        rest = SamplingParams(temperature=0, max_tokens=max(len(whole) - first, 1), ignore_eos=True)
        assert mixed[first:] == tokens(answer(llm, [prompts[0] + mixed[:first]], rest))[0][: len(whole) - first]
