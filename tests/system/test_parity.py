"""Greedy answers equal transformers' token for token in fp32, for every family under every schedule."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.system.oracle import GreedyOracle

VOCAB_SIZE = 1013
SHAPES: dict[str, dict[str, object]] = {  # each family with its own head_dim, group and block size
    "llama": {
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 192,
    },
    "mistral": {
        "hidden_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 80,
        "sliding_window": 48,
    },
    "mixtral": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48},
    "qwen2": {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32},
    "qwen3": {"hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128},
    "qwen3_moe": {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}
BLOCK_SIZES = {"llama": 16, "mistral": 8, "mixtral": 32, "qwen2": 32, "qwen3": 16, "qwen3_moe": 16}
WITH_EXPERTS = ("mixtral", "qwen3_moe")  # in bf16 a near tie of two experts changes all later tokens

SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    "preempted": {"num_kv_blocks": 3 + 800 // 8, "max_num_seqs": 24, "max_num_batched_tokens": 256},
    "priority": {"scheduling_policy": "priority", "max_num_seqs": 8},
    "one step in flight": {"steps_in_flight": 1, "enable_prefix_caching": False},
    "plain torch": {"enforce_reference": True},
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


def make_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Return prompts of 1 to `longest` ids; a third of them share a prefix."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB_SIZE) for _ in range(longest // 2)]
    prompts = []
    for i in range(count):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, longest // 2 if i % 3 else longest + 1))]
        prompts.append(stem + own if i % 3 == 1 else own)
    prompts[0] = prompts[0][:1]
    return prompts


def serve_staggered(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[RequestOutput]:
    """Submit eight requests, then one more for each that finishes."""
    waiting = deque(enumerate(prompts))
    running: deque[Future[RequestOutput]] = deque()
    outputs = []
    while waiting or running:
        while waiting and len(running) < 8:
            index, prompt = waiting.popleft()
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, priority=index % 3)
            running.append(llm.submit(prompt, params))
        outputs.append(running.popleft().result(timeout=100))
    return outputs


def check_all(oracle: GreedyOracle, prompts: list[list[int]], outputs: list[RequestOutput], max_tokens: int) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.finished and output.prompt_token_ids == prompt
        answer = output.outputs[0]
        assert len(answer.token_ids) == max_tokens and answer.finish_reason == "length"
        oracle.check(prompt, answer.token_ids)
    oracle.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", SHAPES)
def test_greedy_answers_equal_transformers_under_every_schedule(
    family: str, schedule: str, folders: dict[str, Path], oracles: dict[str, GreedyOracle]
) -> None:
    options = {"block_size": BLOCK_SIZES[family], **SCHEDULES[schedule]}
    if schedule == "preempted":
        options["num_kv_blocks"] = 3 + 800 // BLOCK_SIZES[family]
    prompts = make_prompts(40, 700, seed=len(family))
    with LLM(folders[family], in_process=True, num_threads=1, max_model_len=800, **options) as llm:
        if schedule == "preempted":
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        else:
            outputs = serve_staggered(llm, prompts, 24)
    if schedule == "plain":
        assert sum(output.num_cached_tokens > 0 for output in outputs) >= 3, "the shared stems were not found"
    if schedule == "one step in flight":
        assert all(output.num_cached_tokens == 0 for output in outputs)
    check_all(oracles[family], prompts, outputs, 24)


FIELD_FAMILIES = (
    *("gemma2", "gemma3_text", "phi3", "olmo2", "granite", "gpt_oss", "starcoder2", "cohere2", "glm4", "smollm3"),
    *("gemma4_moe", "glm4_moe"),
)
PAIRS = [(family, schedule) for family in FIELD_FAMILIES for schedule in SCHEDULES]
NUM_TODAY = 6  # pairs that a day's default run takes


@pytest.mark.parametrize(("family", "schedule"), some(PAIRS, NUM_TODAY))
def test_further_families_equal_transformers_under_every_schedule(family: str, schedule: str, tmp_path: Path) -> None:
    """A day takes other pairs than the day before, since all of them take minutes."""
    folder = tiny_checkpoint(tmp_path / family, family)
    vocab_size = load_model_config(folder).vocab_size
    prompts = [[token_id % vocab_size for token_id in prompt] for prompt in make_prompts(30, 100, seed=len(family))]
    options = {**SCHEDULES[schedule], **({"num_kv_blocks": 3 + 120 // 8} if schedule == "preempted" else {})}
    with LLM(folder, in_process=True, num_threads=1, block_size=8, max_model_len=120, **options) as llm:
        outputs = serve_staggered(llm, prompts, 12)
    check_all(GreedyOracle(folder), prompts, outputs, 12)


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 3), ("qwen3", 2), ("mistral", 2), ("mixtral", 2), ("qwen3_moe", 2)]
)
def test_greedy_answers_equal_transformers_in_all_processes_and_ranks(
    family: str, size: int, folders: dict[str, Path], oracles: dict[str, GreedyOracle]
) -> None:
    prompts = make_prompts(40, 700, seed=size)
    options = {"block_size": BLOCK_SIZES[family], "tensor_parallel_size": size, "max_model_len": 800}
    with LLM(folders[family], device="cpu", max_num_batched_tokens=64, max_num_seqs=16, **options) as llm:
        outputs = serve_staggered(llm, prompts, 16)
    check_all(oracles[family], prompts, outputs, 16)


def test_more_ranks_than_kv_heads_replicate_the_heads(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    folder = tiny_checkpoint(tmp_path / "model", "qwen3", vocab_size=VOCAB_SIZE, **shape)
    prompts = make_prompts(6, 100, seed=4)
    with LLM(folder, device="cpu", tensor_parallel_size=4, max_model_len=200) as llm:
        outputs = serve_staggered(llm, prompts, 12)
    check_all(GreedyOracle(folder), prompts, outputs, 12)


@pytest.mark.parametrize("family", [family for family in SHAPES if family not in WITH_EXPERTS])
def test_bf16_diverges_only_at_near_ties(family: str, folders: dict[str, Path]) -> None:
    prompts = make_prompts(12, 200, seed=9)
    with LLM(folders[family], in_process=True, num_threads=1, max_model_len=400, dtype="bfloat16") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = GreedyOracle(folders[family], torch.bfloat16)
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check_rough(prompt, output.outputs[0].token_ids, tolerance=0.5)


def test_the_oracle_detects_a_wrong_token(folders: dict[str, Path], oracles: dict[str, GreedyOracle]) -> None:
    oracle = GreedyOracle(folders["llama"])
    prompt = [5, 6, 7]
    answer: list[int] = []
    for _ in range(6):
        answer.append(int(oracle.logits(prompt, [*answer, 0])[-1].argmax()))
    oracle.check(prompt, answer)
    for i in range(6):
        wrong = list(answer)
        wrong[i] = (wrong[i] + 1) % VOCAB_SIZE
        with pytest.raises(AssertionError, match="misses"):
            oracle.check(prompt, wrong)
