"""Tiers of every kind of engine: ranks, data types and windows; weights that change; folders that cannot be used."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tokenloom import Client, InternalError
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.tier_engine import (
    GREEDY,
    VOCAB_SIZE,
    TierEngine,
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
    "int8 cache": ("qwen3", ["--kv-cache-dtype", "int8"]),
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
@pytest.mark.parametrize("options", [[], ["--tensor-parallel-size", "2"], ["--kv-cache-dtype", "int8"]])
def test_an_engine_with_other_options_finds_nothing_of_another_one(options: list[str], tmp_path: Path) -> None:
    model, other = (write_model(tmp_path / name, "qwen3", seed) for seed, name in enumerate(("model", "other")))
    prompts, kv = new_prompts(1, 500, seed=22), tmp_path / "kv"
    with opened(tmp_path, kv, "--model", str(model)) as (engine, client):
        compute(engine, client, prompts)
    with opened(tmp_path, kv, "--model", str(model if options else other), *options) as (engine, client):
        engine.teach(client)
        (output,) = ask(client, prompts)
    assert output.num_cached_tokens == 0


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


@pytest.mark.timeout(240)
def test_after_a_reload_that_has_failed_the_tiers_are_open_for_the_old_weights(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", "qwen3")
    broken = Path(shutil.copytree(one, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    prompts = new_prompts(2, 500, seed=23)
    with opened(tmp_path, tmp_path / "kv", "--model", str(one), "--deterministic") as (engine, client):
        calm = compute(engine, client, prompts)
        with pytest.raises(InternalError, match="the old ones stay"):
            client.reload(broken)
        engine.wait_open(2)
        check_equal(calm, ask(client, prompts))


def test_a_folder_that_cannot_be_made_costs_one_line_and_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with TierEngine(tmp_path, tmp_path / "file" / "kv") as engine:
        engine.wait_ready()
        engine.wait_log("requests go on")
        with Client(engine.address) as client:
            for _ in range(3):
                (output,) = ask(client, new_prompts(1, 300, seed=25))
                client.reset_prefix_cache()
                assert len(output.outputs[0].token_ids) == GREEDY.max_tokens
                assert "disk" not in output.metrics.num_loaded_tokens  # blocks may be in slots that wait for the disk
        engine.end()
        errors = [line for line in engine.log().splitlines() if "ERROR" in line]
        assert len(errors) == 1 and "--kv-disk" in errors[0]


@pytest.mark.timeout(300)
def test_tiers_delay_the_start_by_at_most_200_ms(tmp_path: Path) -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(7):
        for has_tiers in (False, True):
            begun = time.monotonic()
            with TierEngine(tmp_path, tmp_path / "kv" if has_tiers else None) as engine:
                engine.wait_ready()
                seconds[has_tiers].append(time.monotonic() - begun)
                engine.end()
    assert min(seconds[True]) <= min(seconds[False]) + 0.2, seconds
