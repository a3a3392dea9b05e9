"""Pause, resume and reload keep requests; answers come from the loaded weights, and no stale prefix is reused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenloom import LLM, RequestError, SamplingParams
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 1600, "max_num_seqs": 1, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = [5 + i % 90 for i in range(70)]


def answer(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(folder / str(seed), seed=seed, max_position_embeddings=2048) for seed in (1, 2)]


@pytest.fixture(scope="module", params=[False, True], ids=["processes", "in process"])
def llm(folders: list[Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(folders[0], in_process=request.param, **OPTIONS) as llm:
        yield llm


def test_a_reload_changes_the_weights_and_drops_the_prefix_cache(llm: LLM, folders: list[Path]) -> None:
    with LLM(folders[1], in_process=True, **OPTIONS) as other:
        expected = answer(other)
    before = answer(llm)
    assert before != expected
    llm.reload(folders[1])
    output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
    llm.reload(os.path.relpath(folders[0]))  # relative to this program: the engine's processes run in /
    assert answer(llm) == before


@pytest.mark.parametrize(
    "option", [{"quantization": "int8"}, pytest.param({"language_model_only": True}, marks=pytest.mark.nightly)]
)
def test_a_reload_keeps_the_options_of_the_start(tmp_path: Path, option: dict[str, Any]) -> None:
    one, two = (vision_checkpoint(tmp_path / str(seed), "qwen2_vl", seed=seed) for seed in (1, 2))
    options = OPTIONS | option | {"in_process": True, "max_model_len": 400}
    with LLM(two, **options) as llm:
        expected = answer(llm)
    with LLM(one, **options) as llm:
        assert answer(llm) != expected
        llm.reload(two)
        assert answer(llm) == expected


@pytest.mark.parametrize("llm", [False], indirect=True, ids=["processes"])  # in process it cannot be started anew
def test_a_reload_with_another_shape_is_refused_and_keeps_the_old_weights(
    llm: LLM, folders: list[Path], tmp_path: Path
) -> None:
    other, broken = tiny_checkpoint(tmp_path / "other", num_hidden_layers=3), tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    before, restarts = answer(llm), llm.health().num_restarts
    with pytest.raises(RequestError, match="another architecture or shape"):
        llm.reload(other)
    with pytest.raises(RequestError, match=r"does not exist|neither a folder"):
        llm.reload(tmp_path / "missing")
    with pytest.raises(Exception, match="the old ones stay"):
        llm.reload(broken)
    assert answer(llm) == before
    assert llm.health().num_restarts == restarts + 1


def test_a_pause_keeps_requests_and_a_resume_continues_them(llm: LLM) -> None:
    whole = llm.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids
    future = llm.submit(PROMPT, LONG)
    llm.pause()
    assert llm.health().num_running + llm.health().num_waiting <= 1
    step = llm.health().step
    assert not future.done()
    assert llm.info().vocab_size and llm.health().step == step
    llm.resume()
    assert future.result(timeout=60).outputs[0].token_ids == whole


def test_a_pause_can_wait_for_requests_or_abort_them(llm: LLM) -> None:
    running = llm.stream(PROMPT, LONG)
    next(running)
    waiting = llm.submit(PROMPT[1:], GREEDY)
    llm.pause("wait")
    assert "".join(running) and not waiting.done()
    llm.resume()
    assert len(waiting.result(timeout=60).outputs[0].token_ids) == 24
    ended = llm.submit(PROMPT[2:], LONG.replace(max_tokens=1500))
    llm.pause("abort")
    assert ended.result(timeout=60).outputs[0].finish_reason == "abort"
    llm.resume()
