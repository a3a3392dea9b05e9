"""An engine serves a GGUF file as it serves the checkpoint that it was made of, with adapters and on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import LLM, ConfigError, LoRARequest, RequestOutput, SamplingParams
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.scripts.bench.inputs.write_gguf import convert

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
PLACES = ("France", "Japan", "Peru", "Kenya", "Norway", "Egypt")
PROMPTS = [f"The capital of {place} is" for place in PLACES]
ADAPTERS = sorted(path for path in (DEMO_FOLDER / "adapters").iterdir() if path.is_dir())
OPTIONS: dict[str, object] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "num_kv_blocks": 64}


@pytest.fixture(scope="module", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep folders of GGUF files and adapters apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path_factory.mktemp("cache") / "own")))
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo-BF16.gguf"
    convert(DEMO_FOLDER, path, "BF16", pre="gpt-2")
    return path


def answers(model: Path, **options: object) -> list[RequestOutput]:
    """Return the answers of the model and of each adapter."""
    with LLM(str(model), dtype="float32", **(OPTIONS | options)) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for adapter in ADAPTERS:
            request = LoRARequest(adapter.name, lora_path=str(adapter))
            found += llm.generate(PROMPTS, GREEDY, lora_request=request, use_tqdm=False)
        return found


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize(
    "options", [{"in_process": True}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.nightly)], ids=str
)
def test_answers_are_those_of_the_original(file: Path, options: dict[str, object]) -> None:
    expected, found = answers(DEMO_FOLDER, in_process=True), answers(file, **options)
    assert tokens_of(found) == tokens_of(expected)
    assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in expected]
    base, *adapted = (tokens_of(expected)[i : i + len(PROMPTS)] for i in range(0, len(expected), len(PROMPTS)))
    assert all(each != base for each in adapted), "or the adapters would not be tested"


@pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")
def test_codes_that_stay_codes_answer_alike(tmp_path: Path) -> None:
    file = tmp_path / "demo-Q8_0.gguf"
    convert(DEMO_FOLDER, file, "Q8_0", pre="gpt-2")
    with LLM(str(file), device="cpu", num_kv_blocks=64, in_process=True) as llm:
        said = [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert said[:2] == [" Paris.", " Tokyo."]
        answer = llm.chat([{"role": "user", "content": "What is the capital of Peru?"}], GREEDY, use_tqdm=False)
        assert answer[0].outputs[0].text == "The capital of Peru is Lima."
        assert "integer products" in llm.info().kernels


def test_a_damaged_file_ends_the_start_with_its_name(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(ConfigError, match=r"cut\.gguf \(.*is truncated or damaged.*fetch the file again"):
        LLM(str(cut), in_process=True)
