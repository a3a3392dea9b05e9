"""Pause, resume and reload keep requests; answers come from the loaded weights, and no stale prefix is reused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tokenloom import LLM, RequestError, SamplingParams
from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = [5 + i % 90 for i in range(70)]


def answer(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("in_process", [False, True])
def test_a_reload_changes_the_weights_and_drops_the_prefix_cache(tmp_path: Path, in_process: bool) -> None:
    one, two = tiny_checkpoint(tmp_path / "one", seed=1), tiny_checkpoint(tmp_path / "two", seed=2)
    options = {"in_process": in_process, "num_threads": 1, "max_model_len": 400, "device": "cpu"}
    with LLM(two, **options) as llm:  # type: ignore[arg-type]
        expected = answer(llm)
    with LLM(one, **options) as llm:  # type: ignore[arg-type]
        before = answer(llm)
        assert before != expected
        llm.reload(two)
        output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
        llm.reload(os.path.relpath(one))  # relative to this program: the engine's processes run in /
        assert answer(llm) == before


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"language_model_only": True}])
def test_a_reload_keeps_the_options_of_the_start(tmp_path: Path, option: dict[str, Any]) -> None:
    one, two = (vision_checkpoint(tmp_path / str(seed), "qwen2_vl", seed=seed) for seed in (1, 2))
    options = option | {"in_process": True, "num_threads": 1, "max_model_len": 400, "device": "cpu"}
    with LLM(two, **options) as llm:
        expected = answer(llm)
    with LLM(one, **options) as llm:
        assert answer(llm) != expected
        llm.reload(two)
        assert answer(llm) == expected


def test_a_reload_with_another_shape_is_refused_and_keeps_the_old_weights(tmp_path: Path) -> None:
    one, other = tiny_checkpoint(tmp_path / "one"), tiny_checkpoint(tmp_path / "other", num_hidden_layers=3)
    broken = Path(shutil.copytree(one, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with LLM(one, num_threads=1, max_model_len=400, device="cpu") as llm:
        before = answer(llm)
        with pytest.raises(RequestError, match="another architecture or shape"):
            llm.reload(other)
        with pytest.raises(RequestError, match=r"does not exist|neither a folder"):
            llm.reload(tmp_path / "missing")
        with pytest.raises(Exception, match="the old ones stay"):
            llm.reload(broken)
        assert answer(llm) == before
        assert llm.health().num_restarts == 1


@pytest.mark.parametrize("in_process", [False, True])
def test_a_pause_keeps_requests_and_a_resume_continues_them(in_process: bool) -> None:
    with LLM(DEMO_FOLDER, in_process=in_process, num_threads=1, device="cpu") as llm:
        whole = llm.generate("The capital of France is", LONG, use_tqdm=False)[0].outputs[0].token_ids
        future = llm.submit("The capital of France is", LONG)
        llm.pause()
        assert llm.health().num_running + llm.health().num_waiting <= 1
        step = llm.health().step
        assert not future.done()
        assert llm.info().vocab_size and llm.health().step == step
        llm.resume()
        assert future.result(timeout=60).outputs[0].token_ids == whole


def test_a_pause_can_wait_for_requests_or_abort_them() -> None:
    with LLM(DEMO_FOLDER, num_threads=1, device="cpu", max_num_seqs=1) as llm:
        running = llm.stream("The capital of France is", LONG)
        next(running)
        waiting = llm.submit("The capital of Peru is", GREEDY)
        llm.pause("wait")
        assert "".join(running) and not waiting.done()
        llm.resume()
        assert len(waiting.result(timeout=60).outputs[0].token_ids) == 24
        ended = llm.submit("The capital of Italy is", SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True))
        llm.pause("abort")
        assert ended.result(timeout=60).outputs[0].finish_reason == "abort"
        llm.resume()
