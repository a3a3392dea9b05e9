"""LoRA adapters of the demo model, over HTTP by OpenAI's official client, by the client library, and in this process.

Tokens are compared with those of the same adapter alone; other tests compare these with peft's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.scripts.adapter_load import linked_cache
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.system.http_engine import DEADLINE_S, samples
from tokenloom.tests.system.launched import LaunchedEngine

PROMPT = "The capital of France is"
NAMES = ("a0", "a1", "a2")


@pytest.fixture(scope="module", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep adapters apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path_factory.mktemp("cache") / "own")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, DEMO_FOLDER, len(NAMES))
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[LaunchedEngine]:
    runtime = tmp_path_factory.mktemp("lora")
    options = ["--http", "0", "--deterministic", "--enable-lora", "--max-loras", "2", "--allow-runtime-lora"]
    with LaunchedEngine(runtime, *options, "--adapter-folder", str(folder)) as engine:
        engine.wait_ready()
        yield engine


@pytest.fixture
def client(engine: LaunchedEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(engine: LaunchedEngine) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=engine.url, timeout=DEADLINE_S) as http:
        yield http


def text_of(client: openai.OpenAI, model: str, max_tokens: int = 8) -> str:
    extra = {"ignore_eos": True}
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body=extra
    )
    assert answer.model == model
    return answer.choices[0].text


def test_each_adapter_of_the_folder_answers_under_its_name_and_is_listed(
    client: openai.OpenAI, http: httpx2.Client, folder: Path
) -> None:
    texts = {model: text_of(client, model) for model in ("tokenloom-demo", *NAMES)}
    assert len(set(texts.values())) == len(texts), "each changes the tokens"
    models = {model.id: model.to_dict() for model in client.models.list()}
    assert list(models) == ["tokenloom-demo", *NAMES]
    assert models["a1"]["root"] == str(folder / "a1") and models["a1"]["parent"] == "tokenloom-demo"
    assert {model: text_of(client, model) for model in reversed(texts)} == texts, "with 2 slots for 3 adapters"
    with pytest.raises(openai.NotFoundError, match="the model 'a9' is not served here: this engine serves"):
        text_of(client, "a9")
    found = samples(http)
    assert found["tokenloom_adapter_requests_total{a0}"] == 2
    assert found["tokenloom_adapter_fills_total{ok}"] >= 3 and found["tokenloom_adapter_slots{ready}"] == 2


def test_a_start_with_a_bad_adapter_exits_with_2_and_one_line(tmp_path: Path) -> None:
    (bad,) = write_adapters(tmp_path / "adapters", DEMO_FOLDER, 1)
    file = bad / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", math.nan))
    with LaunchedEngine(tmp_path, "--enable-lora", "--lora-modules", f"bad={bad}") as engine:
        assert engine.wait_exit() == 2
    (line,) = (line for line in engine.errors.read_text().splitlines() if "INFO" not in line)
    assert "--lora-modules bad: " in line and str(bad) in line and "is NaN or infinite: train or save it again" in line
