"""With --deterministic a request gives the same bits, in tokens and logprobs, under any load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom import LLM, ConfigError, RequestOutput, SamplingParams
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some

SHAPES: dict[str, dict[str, object]] = {  # odd sizes, so that nothing divides evenly
    "llama": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    "mistral": {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 48},
    "qwen3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24},
    "gemma3_text": {"sliding_window": 24},
    "gpt_oss": {"num_hidden_layers": 3},
    "qwen3_moe": {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
}
CASES = [*((family, False, "auto") for family in SHAPES), ("mistral", True, "auto"), ("qwen3_moe", True, "auto")]
BYTES = [("llama", False, "int8"), ("qwen3", False, "fp8"), ("qwen3_moe", False, "int8"), ("qwen3", True, "int8")]
BASE: dict[str, object] = {"in_process": True, "num_threads": 1, "max_model_len": 240, "block_size": 8}
SCHEDULES: dict[str, dict[str, object]] = {
    "among others": {"max_num_seqs": 12},
    "preempted": {"num_kv_blocks": 33, "max_num_seqs": 12, "max_num_batched_tokens": 200},
    "chunked": {"max_num_batched_tokens": 37, "max_num_seqs": 5},
    "prefix hit": {},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    stem = [rng.randrange(256) for _ in range(200)]
    lengths = [1, 7, 8, 31, 120, 177, 201]
    return [[*stem, i, i, 7][-length:] if i % 2 else [*stem[: length - 1], i] for i, length in enumerate(lengths)]


def make_params(index: int) -> SamplingParams:
    fields = {"repetition_penalty": 1.1, "n": 1 + index % 2, "logprobs": 5, "prompt_logprobs": 2}
    return SamplingParams(temperature=index % 3 * 2, top_p=0.95, seed=index, max_tokens=20, ignore_eos=True, **fields)  # type: ignore[arg-type]


def bits(output: RequestOutput) -> object:
    """Return all values that must be equal; floats compare exactly."""
    return [(answer.token_ids, answer.logprobs, answer.text) for answer in output.outputs], output.prompt_logprobs


def open_llm(folder: Path, **options: object) -> LLM:
    return LLM(folder, **(BASE | {"deterministic": True} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "enforce_reference", "kv_cache"), [*some(CASES, 2), *some(BYTES, 1)])
def test_no_schedule_changes_a_bit(family: str, enforce_reference: bool, kv_cache: str, tmp_path: Path) -> None:
    fields: dict[str, object] = {"vocab_size": 300, "num_hidden_layers": 2, **SHAPES[family]}
    folder = tiny_checkpoint(tmp_path / "m", family, **fields)  # type: ignore[arg-type]
    prompts = make_prompts()
    params = [make_params(i) for i in range(len(prompts))]
    own = {"enforce_reference": enforce_reference, "kv_cache_dtype": kv_cache}
    with open_llm(folder, **own, steps_in_flight=1, enable_prefix_caching=False) as llm:
        alone = [llm.generate([each], one, use_tqdm=False)[0] for each, one in zip(prompts, params, strict=True)]
    for schedule, options in SCHEDULES.items():
        with open_llm(folder, **own, **options) as llm:
            if schedule == "prefix hit":
                llm.generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
                params = [one.replace(prompt_logprobs=None) for one in params]  # else no prefix hits
                for output in alone:
                    output.prompt_logprobs = None
            outputs = llm.generate(prompts, params, use_tqdm=False)
        if schedule == "preempted":
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        if schedule == "prefix hit":
            assert sum(output.num_cached_tokens > 0 for output in outputs) >= 3
        for expected, found in zip(alone, outputs, strict=True):
            assert bits(found) == bits(expected), f"{schedule}: a prompt of {len(found.prompt_token_ids)} tokens"


def test_deterministic_answers_agree_with_the_default_kernels(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "mistral", vocab_size=300, num_hidden_layers=2, **SHAPES["mistral"])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    found = []
    for is_deterministic in (True, False):
        with open_llm(folder, deterministic=is_deterministic) as llm:
            found.append([each.outputs[0] for each in llm.generate(make_prompts(), params, use_tqdm=False)])
    for mine, usual in zip(*found, strict=True):
        assert mine.token_ids == usual.token_ids
        assert mine.cumulative_logprob == pytest.approx(usual.cumulative_logprob, abs=1e-3)


@pytest.mark.nightly
def test_too_many_ranks_for_one_order_of_sums_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "llama", num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="at most 2 ranks"):
        LLM(folder, device="cpu", deterministic=True, tensor_parallel_size=4, num_threads=1)
