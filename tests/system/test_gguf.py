"""An engine serves a GGUF file as it serves the checkpoint that it was made of, with adapters and on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom import LLM, Client, LoRARequest, RequestOutput, SamplingParams
from tokenloom.frontend.supervisor.hub import DEMO_FOLDER
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.scripts.adapter_load import linked_cache
from tokenloom.scripts.engine_process import Engine
from tokenloom.scripts.write_gguf import convert

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
PLACES = ("France", "Japan", "Peru", "Kenya", "Norway", "Egypt")
PROMPTS = [f"The capital of {place} is" for place in PLACES]
ADAPTERS = sorted(path for path in (DEMO_FOLDER / "adapters").iterdir() if path.is_dir())
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "device": "cpu", "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache") / "own")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo-BF16.gguf"
    convert(DEMO_FOLDER, path, "BF16", pre="gpt-2")
    return path


def answers(model: Path, **options: object) -> list[RequestOutput]:
    """Return the answers of the model and of each adapter."""
    with LLM(str(model), **(OPTIONS | options)) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for adapter in ADAPTERS:
            request = LoRARequest(adapter.name, lora_path=str(adapter))
            found += llm.generate(PROMPTS, GREEDY, lora_request=request, use_tqdm=False)
        return found


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.timeout(180)
def test_answers_are_those_of_the_original(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    expected = answers(DEMO_FOLDER, dtype="float32")
    whole, sharded = (answers(file, dtype="float32", tensor_parallel_size=size) for size in (1, 2))
    assert tokens_of(whole) == tokens_of(expected) == tokens_of(sharded)
    assert [each.outputs[0].text for each in whole] == [each.outputs[0].text for each in expected]
    base, *adapted = (tokens_of(expected)[i : i + len(PROMPTS)] for i in range(0, len(expected), len(PROMPTS)))
    assert all(each != base for each in adapted), "or the adapters would not be tested"


@pytest.mark.timeout(180)
@pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")
def test_codes_that_stay_codes_answer_alike(tmp_path: Path, cache: Path) -> None:
    convert(DEMO_FOLDER, tmp_path / "demo-Q8_0.gguf", "Q8_0", pre="gpt-2")
    options = ["--model", str(tmp_path / "demo-Q8_0.gguf"), "--int8-activations", "--device", "cpu"]
    with Engine(tmp_path, options, {"XDG_CACHE_HOME": str(cache)}) as engine:
        engine.wait_ready()
        with Client(engine.address) as client:
            said = [each.outputs[0].text for each in client.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert said[:2] == [" Paris.", " Tokyo."]
            answer = client.chat([{"role": "user", "content": "What is the capital of Peru?"}], GREEDY)
            assert answer[0].outputs[0].text == "The capital of Peru is Lima."
        assert "int8 activations" in engine.errors.read_text(encoding="utf-8")


@pytest.mark.timeout(60)
def test_a_damaged_file_ends_the_start_in_one_line(file: Path, tmp_path: Path, cache: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100_000])
    with Engine(tmp_path, ["--model", str(cut)], {"XDG_CACHE_HOME": str(cache)}) as engine:
        assert engine.process.wait(40) == 2
        (line,) = engine.errors.read_text(encoding="utf-8").strip().splitlines()
    assert f"{cut} (" in line and "is truncated or damaged" in line and "fetch the file again" in line
