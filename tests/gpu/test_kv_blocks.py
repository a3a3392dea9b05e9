"""On a GPU: blocks that were in pinned memory continue answers with the same bits; a cache of 8 bits answers as one on
the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom import LLM, Client, SamplingParams
from tokenloom.tests.gpu.sizes import SIZES
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.tier_engine import (
    GREEDY,
    VOCAB_SIZE,
    TierEngine,
    ask,
    check_equal,
    new_prompts,
    num_readable,
)

pytestmark = pytest.mark.gpu

SHAPE: dict[str, object] = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
LENGTH, NUM_EVICTED = 100, 3  # of a prompt; prompts that others evict
START_S = 200.0  # with compilation
LIMITS = (  # a pool for two prompts
    *("--num-kv-blocks", "20", "--max-model-len", "128", "--max-num-seqs", "2"),
    *("--max-num-batched-tokens", "64", "--speculation", "off"),
)
PARAMS = GREEDY.replace(max_tokens=3)
NEAR_TIE = 0.05  # of logprobs, which differ by the rounding of stored keys and values
FIRST = 0.1


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_evicted_blocks_come_back_from_pinned_memory(kv_cache_dtype: str, device: torch.device, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "qwen3", **SHAPE)
    options = ["--model", str(model), "--device", device.type, "--kv-host-bytes", "16M", "--deterministic", *LIMITS]
    options += ["--kv-cache-dtype", kv_cache_dtype]
    prompts = new_prompts(2 * NUM_EVICTED, LENGTH, seed=4)
    with TierEngine(tmp_path, None, *options) as engine:
        engine.wait_ready(START_S)
        with Client(engine.address) as client:
            computed = ask(client, prompts, PARAMS)
            client.reset_prefix_cache()
            outputs = ask(client, prompts[:NUM_EVICTED], PARAMS)
        engine.end()
    assert all(output.num_cached_tokens == 0 for output in computed)
    loaded = [output.metrics.num_loaded_tokens for output in outputs]
    assert loaded == [{"host": num_readable(prompts[0])}] * NUM_EVICTED
    check_equal(computed[:NUM_EVICTED], outputs)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_cache_of_8_bits_answers_as_on_the_cpu(kind: str, device: torch.device, tmp_path: Path) -> None:
    """Up to the first near tie of each answer."""
    folder = tiny_checkpoint(tmp_path, "qwen3", **SHAPE)
    prompts = new_prompts(4, 40, seed=5)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    answers = []
    for where in (device.type, "cpu"):
        options = {**SIZES.limits, "device": where, "dtype": "float32", "kv_cache_dtype": kind, "in_process": True}
        options |= {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}
        with LLM(folder, **options) as llm:  # type: ignore[arg-type]
            answers.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
    for here, there in zip(*answers, strict=True):
        for token, other, found, wanted in zip(
            here.token_ids, there.token_ids, here.logprobs, there.logprobs, strict=True
        ):
            assert abs(found[token].logprob - wanted[other].logprob) < FIRST
            if token != other:
                assert abs(wanted[token].logprob - wanted[other].logprob) < NEAR_TIE
                break
