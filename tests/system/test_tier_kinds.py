"""Tiers of every kind of engine: ranks, data types and windows; weights that change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.tier_engine import (
    VOCAB_SIZE,
    ask,
    check_equal,
    compute,
    new_prompts,
    num_readable,
    opened,
)

pytestmark = pytest.mark.nightly

KINDS: dict[str, tuple[str, list[str]]] = {  # family and options
    "one rank": ("qwen3", []),
    "two ranks": ("qwen3", ["--tensor-parallel-size", "2"]),
    "fp8 cache": ("qwen3", ["--kv-cache-dtype", "fp8"]),
    "bf16": ("qwen3", ["--dtype", "bfloat16"]),
    "sliding window": ("mistral", []),
    "layers with and without a window": ("gemma3_text", []),
    "small blocks": ("llama", ["--block-size", "8"]),
}
WINDOW = 48


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    window = {"sliding_window": WINDOW} if family == "mistral" else {}
    return tiny_checkpoint(folder, family, seed=seed, vocab_size=VOCAB_SIZE, max_position_embeddings=1024, **window)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_engine_of_any_kind_has_the_same_bits_from_the_disk(kind: str, tmp_path: Path) -> None:
    family, options = KINDS[kind]
    model = write_model(tmp_path / "model", family)
    options = ["--model", str(model), "--deterministic", *options]
    prompts, kv = new_prompts(3, 500, seed=21), tmp_path / "kv"
    with opened(tmp_path, kv, *options) as (engine, client):
        calm = compute(engine, client, prompts)
    with opened(tmp_path, kv, *options) as (engine, client):
        engine.teach(client)
        outputs = ask(client, prompts)
    assert [output.metrics.num_loaded_tokens for output in outputs] == [{"disk": num_readable(prompts[0])}] * 3
    check_equal(calm, outputs)


@pytest.mark.timeout(240)
def test_reloaded_weights_find_their_own_blocks_alone(tmp_path: Path) -> None:
    one, two = (write_model(tmp_path / name, "qwen3", seed) for seed, name in enumerate(("one", "two")))
    prompts = new_prompts(2, 500, seed=23)
    with opened(tmp_path, tmp_path / "kv", "--model", str(one), "--deterministic") as (engine, client):
        first = compute(engine, client, prompts)
        client.reload(two)
        engine.wait_open(2)
        engine.teach(client)
        second = compute(engine, client, prompts)  # which checks that nothing was cached
        for number, (model, calm) in enumerate([(one, first), (two, second)]):
            client.reload(model)
            engine.wait_open(3 + number)
            engine.teach(client)
            outputs = ask(client, prompts)
            assert [output.num_cached_tokens for output in outputs] == [num_readable(prompt) for prompt in prompts]
            check_equal(calm, outputs)
    assert [output.outputs[0].logprobs for output in first] != [output.outputs[0].logprobs for output in second]
