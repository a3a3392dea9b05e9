"""Drafts beside adapters, images and kills: no token is changed, repeated or lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system import adapter_engine, media_engine, media_families, recorded_drafts
from tokenloom.tests.system.launched import serve
from tokenloom.tests.system.sampling_engine import VOCAB_SIZE, make_prompts, open_llm, sampling_checkpoint
from tokenloom.tests.system.test_speculation import num_drafts

RECOVERY_S = 60.0


@pytest.mark.parametrize(
    ("role", "num_replicas"),
    [
        ("worker 0", 1),
        ("core", 1),
        ("frontend", 1),
        pytest.param("core", 2, marks=pytest.mark.nightly),
        pytest.param("core of replica 1", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_process_killed_between_drafts_and_their_result_changes_no_answer(
    role: str, num_replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sampling_checkpoint(tmp_path / "m")
    prompts = make_prompts(24, 8)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=200, ignore_eos=True) for i in range(24)]
    with open_llm(folder, deterministic=True, speculation="off") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    recorded_drafts.record(tmp_path / "record", "mixed", VOCAB_SIZE, expected, params)
    recorded_drafts.use(monkeypatch, tmp_path / "record")
    flags = "--deterministic --num-threads 1 --max-model-len 400 --block-size 8 --max-num-seqs 8"
    flags += f" --data-parallel-size {num_replicas}"
    outputs: list[RequestOutput] = []
    for engine in serve(Engine(tmp_path, ["--model", str(folder), *flags.split()])):
        with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
            thread = threading.Thread(target=lambda: outputs.extend(client.generate(prompts, params, use_tqdm=False)))
            thread.start()
            deadline = time.monotonic() + RECOVERY_S
            while client.health().step < 40:
                assert time.monotonic() < deadline, "no steps"
                time.sleep(0.002)
            engine.child(role).kill()
            assert thread.is_alive(), "the requests ended before the process"
            thread.join(RECOVERY_S)
            assert not thread.is_alive(), "the requests do not end"
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]
    drafted, accepted = num_drafts(outputs)
    assert drafted > accepted > 100


@pytest.mark.nightly
@pytest.mark.timeout(150)
@pytest.mark.parametrize("role", ["core", "core of replica 1"])
def test_a_core_of_several_replicas_killed_while_it_verifies_lookups_changes_no_answer(
    role: str, tmp_path: Path
) -> None:
    folder = sampling_checkpoint(tmp_path / "m")
    prompts = [prompt * 2 for prompt in make_prompts(24, 8)]  # repeated tokens are found and guessed
    params = [SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)] * len(prompts)
    with open_llm(folder, deterministic=True, speculation="off") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    flags = "--deterministic --num-threads 1 --max-model-len 400 --block-size 8 --max-num-seqs 8 --speculation lookup"
    for engine in serve(Engine(tmp_path, ["--model", str(folder), *flags.split(), "--data-parallel-size", "2"])):
        with Client(engine.address, reconnect_timeout_s=RECOVERY_S) as client:
            futures = [client.submit(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
            deadline = time.monotonic() + RECOVERY_S
            while client.health().step < 60:
                assert time.monotonic() < deadline, "no steps"
                time.sleep(0.002)
            engine.child(role).kill()
            assert not all(future.done() for future in futures), "the requests ended before the process"
            outputs = [future.result(timeout=RECOVERY_S) for future in futures]
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]
    drafted, accepted = num_drafts(outputs)
    assert drafted >= accepted > 20


def test_drafts_of_rows_with_adapters_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder = tmp_path / "models"
    checkpoint = tiny_checkpoint(models_folder / "model", "qwen3", vocab_size=adapter_engine.VOCAB_SIZE)
    modules = [f"{path.name}={path}" for path in write_adapters(models_folder / "adapters", checkpoint, 3)]
    names = ["", *(each.split("=")[0] for each in modules)]
    requests = adapter_engine.make_requests(names, 12, seed=4, max_tokens=20)
    options = {**adapter_engine.OPTIONS, "in_process": True, "lora_modules": modules, "deterministic": True}
    with adapter_engine.LLM(checkpoint, **options, speculation="off") as llm:  # type: ignore[arg-type]
        expected = requests.run(llm)
    recorded_drafts.record(tmp_path / "record", "mixed", adapter_engine.VOCAB_SIZE, expected, requests.params)
    recorded_drafts.use(monkeypatch, tmp_path / "record")
    with adapter_engine.LLM(checkpoint, **options, max_num_seqs=5) as llm:  # type: ignore[arg-type]
        found = requests.run(llm)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    drafted, accepted = num_drafts(found)
    assert drafted > accepted > 20


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_drafts_behind_images_change_no_answer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind images have shifted positions, and their prompts hold placeholders."""
    models = media_families.make_models(tmp_path / "m", family)
    requests = media_engine.make_requests(models, 5, 6)
    with media_engine.open_llm(models, deterministic=True, speculation="off") as llm:
        expected = media_engine.run(llm, models, requests)
        vocab_size = max(token for each in expected for token in each.outputs[0].token_ids) + 1
    params = [SamplingParams(temperature=0, seed=None)] * len(expected)
    recorded_drafts.record(tmp_path / "record", "mixed", vocab_size, expected, params)
    recorded_drafts.use(monkeypatch, tmp_path / "record")
    with media_engine.open_llm(models, deterministic=True, max_num_seqs=4) as llm:
        found = media_engine.run(llm, models, requests)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    drafted, accepted = num_drafts(found)
    assert drafted > accepted > 10
