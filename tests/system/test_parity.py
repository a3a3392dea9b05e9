"""Greedy answers equal transformers' token for token in fp32, for every family under every schedule.

A day takes a part of the families and schedules, the nightly run all of them.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some, some_pairs
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
WITH_WINDOWS_ALONE = ("phi3", "starcoder2")  # of 8 tokens in all layers: a row that decodes needs no further block

NUM_PROMPTS, LONGEST, NUM_ANSWERED, MAX_MODEL_LEN = 16, 180, 12, 224
FURTHER_FAMILIES = (
    *("gemma2", "gemma3_text", "phi3", "olmo2", "granite", "gpt_oss", "starcoder2", "cohere2", "glm4", "smollm3"),
    *("gemma4_moe", "glm4_moe"),
)
SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    "preempted": {"block_size": 8, "max_num_seqs": 24, "max_num_batched_tokens": 64},  # answers grow by five blocks
    "priority": {"scheduling_policy": "priority", "max_num_seqs": 8},
    "one step in flight": {"steps_in_flight": 1, "enable_prefix_caching": False},
    "plain torch": {"enforce_reference": True},
}
PAIRS = [
    *some_pairs(list(SHAPES), list(SCHEDULES), every=3),
    *some([(family, schedule) for family in FURTHER_FAMILIES for schedule in SCHEDULES], num_today=4),
]
RANKS = {"llama": 3, "mistral": 2, "mixtral": 2, "qwen2": 2, "qwen3": 2, "qwen3_moe": 2}  # qwen2: more than KV heads


class Models:
    """Checkpoints with their oracles, each made at its first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Path, GreedyOracle]] = {}

    def __getitem__(self, family: str) -> tuple[Path, GreedyOracle]:
        if family not in self._made:
            fields = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, **SHAPES[family]} if family in SHAPES else {}
            folder = tiny_checkpoint(self._root / family, family, **fields)
            self._made[family] = folder, GreedyOracle(folder)
        return self._made[family]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


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


@pytest.mark.parametrize(("family", "schedule"), PAIRS)
def test_greedy_answers_equal_transformers_under_every_schedule(family: str, schedule: str, models: Models) -> None:
    folder, oracle = models[family]
    vocab_size = load_model_config(folder).vocab_size
    longest, max_model_len = (LONGEST, MAX_MODEL_LEN) if family in SHAPES else (100, 120)  # phi3's positions end at 128
    num_answered = NUM_ANSWERED
    if schedule == "preempted":  # prompts that fill no window, and answers that do
        longest, num_answered = longest // 2, 40
    prompts = make_prompts(NUM_PROMPTS, longest, seed=len(family))
    prompts = [[token_id % vocab_size for token_id in prompt] for prompt in prompts]
    options = {"block_size": BLOCK_SIZES.get(family, 8), "max_model_len": max_model_len, **SCHEDULES[schedule]}
    if schedule == "preempted":
        options["num_kv_blocks"] = 2 + max_model_len // 8
    with LLM(folder, in_process=True, num_threads=1, **options) as llm:
        if schedule == "preempted":
            params = SamplingParams(temperature=0, max_tokens=num_answered, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert sum(output.metrics.num_preemptions for output in outputs) > 0 or family in WITH_WINDOWS_ALONE
        else:
            outputs = serve_staggered(llm, prompts, num_answered)
    if schedule == "plain" and family in SHAPES:
        assert sum(output.num_cached_tokens > 0 for output in outputs) >= 2, "the shared stems were not found"
    if schedule == "one step in flight":
        assert all(output.num_cached_tokens == 0 for output in outputs)
    check_all(oracle, prompts, outputs, num_answered)


@pytest.mark.parametrize("family", some(list(RANKS), num_today=1))
def test_greedy_answers_equal_transformers_in_all_processes_and_ranks(family: str, models: Models) -> None:
    folder, oracle = models[family]
    prompts = make_prompts(NUM_PROMPTS, LONGEST, seed=RANKS[family])
    options = {"block_size": BLOCK_SIZES[family], "tensor_parallel_size": RANKS[family], "max_num_seqs": 16}
    with LLM(folder, device="cpu", max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, **options) as llm:
        outputs = serve_staggered(llm, prompts, NUM_ANSWERED)
    check_all(oracle, prompts, outputs, NUM_ANSWERED)


@pytest.mark.parametrize("family", some([family for family in SHAPES if family not in WITH_EXPERTS], num_today=1))
def test_bf16_diverges_only_at_near_ties(family: str, models: Models) -> None:
    folder, _ = models[family]
    prompts = make_prompts(NUM_PROMPTS, LONGEST, seed=9)
    with LLM(folder, in_process=True, num_threads=1, max_model_len=MAX_MODEL_LEN, dtype="bfloat16") as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    oracle = GreedyOracle(folder, torch.bfloat16)
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check_rough(prompt, output.outputs[0].token_ids, tolerance=0.5)
