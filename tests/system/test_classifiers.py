"""Heads on decoders: classes, scores and rewards equal transformers', in fp32, under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenloom import LLM, PoolingParams, RequestError
from tokenloom.tests.support.headed_checkpoints import Head, headed_checkpoint
from tokenloom.tests.support.today import some, some_pairs
from tokenloom.tests.system.test_parity import VOCAB_SIZE, make_prompts

TOLERANCE = 1e-5
LLAMA = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 128}
QWEN3 = {**LLAMA, "head_dim": 32}
SHAPES: dict[str, dict[str, object]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "mistral": {**LLAMA, "sliding_window": 32},
    "gemma2": {},
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {},
}
SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempted": {"num_kv_blocks": 13, "max_num_seqs": 24, "max_num_batched_tokens": 96},
}
PROMPTS = make_prompts(10, 90, seed=5)
LONG = max(PROMPTS, key=len)


def start(folder: Path, schedule: str = "plain") -> LLM:
    return LLM(folder, in_process=True, num_threads=1, max_model_len=128, dtype="float32", **SCHEDULES[schedule])


def off(found: object, expected: torch.Tensor) -> float:
    given = torch.tensor(found)
    assert given.shape == expected.shape
    return float((given - expected).abs().max())


@pytest.mark.parametrize(("family", "schedule"), some_pairs([*SHAPES, "gemma3"], list(SCHEDULES), every=12))
def test_probabilities_of_prompts_equal_transformers(family: str, schedule: str, tmp_path: Path) -> None:
    made = headed_checkpoint(tmp_path, family, "sequence", vocab_size=VOCAB_SIZE, **SHAPES.get(family, {}))
    raw = PoolingParams(use_activation=False)
    with start(tmp_path, schedule) as llm:
        assert llm.info().pooling_tasks == ["classify", "token_classify"]
        logits, probs = (llm.classify(PROMPTS, params, use_tqdm=False) for params in (raw, None))
    for prompt, bare, active in zip(PROMPTS, logits, probs, strict=True):
        expected = made.logits(prompt)
        assert off(bare.outputs.probs, expected) <= TOLERANCE
        assert off(active.outputs.probs, expected.softmax(-1)) <= TOLERANCE


@pytest.mark.parametrize(("family", "schedule"), some_pairs(list(SHAPES), list(SCHEDULES), every=12))
def test_probabilities_of_tokens_equal_transformers(family: str, schedule: str, tmp_path: Path) -> None:
    made = headed_checkpoint(tmp_path, family, "token", vocab_size=VOCAB_SIZE, **SHAPES[family])
    with start(tmp_path, schedule) as llm:
        assert llm.info().pooling_tasks == ["token_classify"]
        outputs = llm.encode(PROMPTS, pooling_task="token_classify", use_tqdm=False)
        with pytest.raises(RequestError, match=r"task is classify, but this model .* serves token_classify"):
            llm.classify(PROMPTS[:1], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert off(output.outputs.data, made.logits(prompt).softmax(-1)) <= TOLERANCE


@pytest.mark.parametrize("head", ["reward", "steps"])
def test_rewards_of_tokens_and_of_steps_equal_their_layers(head: Head, tmp_path: Path) -> None:
    num_labels = {"reward": 1, "steps": 2}[head]
    made = headed_checkpoint(tmp_path, "qwen2", head, num_labels, vocab_size=VOCAB_SIZE, **LLAMA)
    tag = LONG[3]
    only = PoolingParams(step_tag_id=tag, returned_token_ids=[num_labels - 1], use_activation=False)
    with start(tmp_path, "chunked") as llm:
        rewards, (steps,) = llm.reward(PROMPTS, use_tqdm=False), llm.reward([LONG], only, use_tqdm=False)
        with pytest.raises(RequestError, match="returned_token_ids has 7, the head gives"):
            llm.reward(PROMPTS[:1], PoolingParams(returned_token_ids=[7]), use_tqdm=False)
    for prompt, output in zip(PROMPTS, rewards, strict=True):
        expected = made.logits(prompt)
        assert off(output.outputs.data, expected if head == "reward" else expected.softmax(-1)) <= TOLERANCE
    places = [index for index, token in enumerate(LONG) if token == tag]
    assert off(steps.outputs.data, made.logits(LONG)[places, num_labels - 1 :]) <= TOLERANCE


@pytest.mark.parametrize("family", some(list(SHAPES), 2))
def test_a_model_without_a_head_embeds_and_generates_nothing(family: str, tmp_path: Path) -> None:
    made = headed_checkpoint(tmp_path, family, "none", vocab_size=VOCAB_SIZE, **SHAPES[family])
    with start(tmp_path) as llm:
        outputs = llm.embed(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
        (rows,) = llm.encode(PROMPTS[:1], PoolingParams(dimensions=8), pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(RequestError, match="generates no tokens, since it has no language model's head"):
            llm.generate(PROMPTS[:1], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert off(output.outputs.embedding, made.states(prompt)[-1]) <= TOLERANCE
    first = made.states(PROMPTS[0])[:, :8]
    assert off(rows.outputs.data, first / first.norm(dim=-1, keepdim=True)) <= TOLERANCE


def test_a_prompt_gets_its_probabilities_when_its_prefix_is_cached(tmp_path: Path) -> None:
    made = headed_checkpoint(tmp_path, "qwen3", "sequence", vocab_size=VOCAB_SIZE, **QWEN3)
    prompt = (LONG * 9)[:100]
    with start(tmp_path) as llm:
        first, second = (llm.classify([prompt], use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens >= 80
    for each in (first, second):
        assert off(each.outputs.probs, made.logits(prompt).softmax(-1)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "activate"),
    [
        ("linear.Identity", lambda x: x),
        ("activation.Sigmoid", torch.sigmoid),
        ("activation.Softmax", lambda x: x.softmax(-1)),
    ],
)
def test_a_cross_encoders_settings_say_its_activation(
    name: str, activate: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    stated = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{name}"}}
    made = headed_checkpoint(tmp_path, "llama", "sequence", 3, vocab_size=VOCAB_SIZE, **LLAMA, **stated)
    with start(tmp_path) as llm:
        (output,) = llm.classify(PROMPTS[:1], use_tqdm=False)
    assert off(output.outputs.probs, activate(made.logits(PROMPTS[0]))) <= TOLERANCE


@pytest.mark.parametrize(
    ("problem_type", "activate"),
    [("regression", lambda x: x), ("multi_label_classification", torch.sigmoid), (None, torch.sigmoid)],
)
def test_the_problem_of_a_classifier_says_its_activation(
    problem_type: str | None, activate: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    num_labels = 1 if problem_type is None else 2
    fields = {} if problem_type is None else {"problem_type": problem_type}
    made = headed_checkpoint(tmp_path, "llama", "sequence", num_labels, vocab_size=VOCAB_SIZE, **LLAMA, **fields)
    with start(tmp_path) as llm:
        (output,) = llm.classify(PROMPTS[:1], use_tqdm=False)
    assert off(output.outputs.probs, activate(made.logits(PROMPTS[0]))) <= TOLERANCE
