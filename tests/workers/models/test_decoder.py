"""Logits of our decoder equal those of transformers in float32, however the tokens are scheduled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some, some_pairs
from tokenloom.tests.workers.paged_run import PagedRun, load
from tokenloom.workers.step.kv_cache import KVCacheSpec

TOLERANCE = 1e-4
IN_HALVES = ("qwen3", "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "qwen2_moe")

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {  # family, block size, fields of config.json
    "llama, GQA 3, one KV head": ("llama", 16, {}),
    "llama, untied, biases everywhere": (
        "llama",
        8,
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "vocab_size": 401},
    ),
    "llama, head_dim 128": (
        "llama",
        32,
        {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "mistral, window smaller than the prompt": ("mistral", 16, {}),
    "mistral, window smaller than a block": ("mistral", 32, {"sliding_window": 5}),
    "mistral, no window": ("mistral", 8, {"sliding_window": 100_000}),
    "mixtral, 2 of 5 experts": ("mixtral", 16, {}),
    "mixtral, one expert for all": ("mixtral", 8, {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen2, GQA 8": ("qwen2", 8, {}),
    "qwen2, window in the upper layers": (
        "qwen2",
        16,
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3, head_dim 80": ("qwen3", 32, {}),
    "qwen3_moe, 3 of 12 experts, a dense layer between": ("qwen3_moe", 16, {}),
    "qwen3_moe, weights not normalized, each second layer": (
        "qwen3_moe",
        8,
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts_per_tok": 8},
    ),
    "qwen3, tied, GQA 2": ("qwen3", 16, {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
}


def schedule(lengths: dict[str, int], seed: int) -> list[dict[str, int]]:
    """Steps of random chunks, most of them one token: requests come in staggered until all have their length."""
    draw = random.Random(seed)
    left, steps = dict(lengths), []
    while any(left.values()):
        step = {}
        for name, count in left.items():
            if count and draw.random() < 0.8:
                step[name] = min(count, draw.choice([1, 1, 2, 7, 40, 300]))
                left[name] -= step[name]
        if step:
            steps.append(step)
    return steps


def prompts_of(lengths: dict[str, int], vocab_size: int, seed: int) -> dict[str, list[int]]:
    draw = random.Random(seed)
    return {name: [draw.randrange(vocab_size) for _ in range(length)] for name, length in lengths.items()}


def run_schedule(run: PagedRun, tokens: dict[str, list[int]], steps: list[dict[str, int]]) -> dict[str, Tensor]:
    """All logits of each request, [length, vocab]."""
    done = dict.fromkeys(tokens, 0)
    logits: dict[str, list[Tensor]] = {name: [] for name in tokens}
    for step in steps:
        results = run.step({name: tokens[name][done[name] : done[name] + count] for name, count in step.items()})
        for name, result in results.items():
            logits[name].append(result)
            done[name] += step[name]
    return {name: torch.cat(parts) for name, parts in logits.items()}


def oracle(folder: Path, tokens: dict[str, list[int]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    load_theirs: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load_theirs(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return {name: model(torch.tensor([ids])).logits[0].float() for name, ids in tokens.items()}


@pytest.mark.parametrize("case", some(list(MODELS), 4))
def test_logits_equal_transformers_under_any_schedule(case: str, tmp_path: Path) -> None:
    family, block_size, fields = MODELS[case]
    folder = tiny_checkpoint(tmp_path, family, seed=len(case), **fields)
    lengths = {"a": 310, "b": 1, "c": 77, "d": 33, "e": 64, "f": 2}
    model = load(folder)
    tokens = prompts_of(lengths, model.compute_logits(torch.zeros(1, _hidden_size(folder))).shape[1], seed=1)
    expected = oracle(folder, tokens)
    actual = run_schedule(PagedRun(model, block_size), tokens, schedule(lengths, seed=len(case)))
    for name in tokens:
        torch.testing.assert_close(actual[name], expected[name], atol=TOLERANCE, rtol=0, msg=f"{case}: {name}")


@pytest.mark.parametrize(
    ("family", "dtype"),
    some_pairs(IN_HALVES, [torch.bfloat16, torch.float16], every=3),
)
def test_half_precision_is_as_close_to_float32_as_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=3)
    tokens = prompts_of({"a": 120, "b": 40}, 256, seed=4)
    exact, rounded = oracle(folder, tokens), oracle(folder, tokens, dtype)
    model = load(folder, dtype)
    actual = run_schedule(PagedRun(model, 16, dtype=dtype), tokens, [{"a": 100, "b": 30}, {"a": 20, "b": 10}])
    for name in tokens:
        # per token, since rounding changes the choice of experts for a few tokens of either
        ours = (actual[name] - exact[name]).abs().mean(dim=1).median()
        theirs = (rounded[name] - exact[name]).abs().mean(dim=1).median()
        assert ours <= 1.1 * theirs


def test_a_step_without_tokens_changes_nothing(tmp_path: Path) -> None:
    run = PagedRun(load(tiny_checkpoint(tmp_path)), 16)
    before = run.kv_cache.clone()
    assert run.step({}) == {}
    assert torch.equal(run.kv_cache, before)


def test_a_model_reports_its_kv_cache_spec_and_weight_bytes(tmp_path: Path) -> None:
    tied = load(tiny_checkpoint(tmp_path / "tied", "qwen2"), max_model_len=10)
    untied = load(tiny_checkpoint(tmp_path / "untied", "qwen2", tie_word_embeddings=False), max_model_len=10)
    files = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("tied", "untied")]
    assert tied.kv_cache_specs(4, torch.float32) == [KVCacheSpec(2, 1, 16, 4, torch.float32)]
    assert untied.weight_bytes - tied.weight_bytes == 293 * 128 * 4  # the head
    for model, file_bytes in zip((tied, untied), files, strict=True):
        rotary_bytes = 10 * 16 * 4
        # less by the file's header, more where kernels want padding
        padded = model.weight_bytes - rotary_bytes - file_bytes
        assert -8192 < padded < file_bytes // 20


def _hidden_size(folder: Path) -> int:
    size: int = transformers.AutoConfig.from_pretrained(folder).hidden_size
    return size
