"""LoRA adapters of the demo model, over HTTP by OpenAI's official client, by the client library, and in this process.

Tokens are compared with those of the same adapter alone; other tests compare these with peft's.
"""

from __future__ import annotations

import math
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx2
import openai
import pytest

from tokenloom import LLM, Client, LoRARequest, RequestOutput, SamplingParams
from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.scripts.adapter_load import linked_cache
from tokenloom.tests.frontend.adapters.samples import write_adapter
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.today import some
from tokenloom.tests.system.http_engine import DEADLINE_S, samples
from tokenloom.tests.system.launched import LaunchedEngine

PROMPT = "The capital of France is"
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = LONG.replace(max_tokens=24)
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


def order(http: httpx2.Client, action: str, name: str, path: str = "", **more: object) -> None:
    body = {"lora_name": name, **({"lora_path": path} if path else {}), **more}
    response = http.post(f"/v1/{action}_lora_adapter", json=body)
    assert response.status_code == 200, response.text


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


def test_a_stream_goes_on_with_its_adapter_while_the_name_is_unloaded_and_loaded_anew(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    order(http, "load", "sql", "a0")
    old, new = text_of(client, "sql", 150), text_of(client, "a1")
    stream = client.completions.create(
        model="sql", prompt=PROMPT, max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    text = next(stream).choices[0].text
    order(http, "unload", "sql")
    with pytest.raises(openai.NotFoundError):
        text_of(client, "sql")
    order(http, "load", "sql", "a1")
    assert text_of(client, "sql") == new
    assert text + "".join(chunk.choices[0].text for chunk in stream) == old
    order(http, "load", "sql", "a0", load_inplace=True)
    assert text_of(client, "sql") != new
    order(http, "unload", "sql")


@pytest.mark.parametrize("role", some(["frontend", "core", "worker 0"], num_today=1))
def test_requests_keep_their_adapters_through_the_loss_of_a_process(
    engine: LaunchedEngine, folder: Path, role: str
) -> None:
    with Client(engine.address) as client:
        expected = {
            name: client.generate(PROMPT, LONG, use_tqdm=False, model=name)[0].outputs[0].token_ids for name in NAMES
        }
        client.load_adapter("moving", folder / "a0")
        futures: list[Future[RequestOutput]] = [client.submit(PROMPT, LONG, model=name) for name in (*NAMES, "moving")]
        next(client.stream(PROMPT, LONG, model="moving"))
        client.load_adapter("moving", folder / "a1", load_inplace=True)
        engine.child(role).send_signal(signal.SIGKILL)
        later = client.generate(PROMPT, LONG, use_tqdm=False, model="moving")[0].outputs[0].token_ids
        found = [future.result(DEADLINE_S).outputs[0].token_ids for future in futures]
        assert found == [expected[name] for name in (*NAMES, "a0")] and later == expected["a1"]
        assert {info.name for info in client.list_adapters()} >= {*NAMES, "moving"}
        client.unload_adapter("moving")


def test_one_batch_holds_several_adapters_and_the_model_in_this_process(folder: Path) -> None:
    modules = [f"{name}={folder / name}" for name in NAMES]
    with LLM(enable_lora=True, in_process=True, lora_modules=modules, max_loras=2, device="cpu", num_threads=1) as llm:
        alone = [llm.generate(PROMPT, SHORT, use_tqdm=False, model=name)[0] for name in NAMES]
        requests = [*map(LoRARequest, NAMES), None]
        together = llm.generate([PROMPT] * 4, SHORT, use_tqdm=False, lora_request=requests)
        assert [each.outputs[0].token_ids for each in together[:3]] == [each.outputs[0].token_ids for each in alone]
        assert len({tuple(each.outputs[0].token_ids) for each in together}) == 4
        vectors = {name: tuple(llm.embed(PROMPT, use_tqdm=False, model=name)[0].outputs.embedding) for name in NAMES}
        assert len(set(vectors.values())) == 3
        llm.unload_adapter("a2")
        assert [info.name for info in llm.list_adapters()] == ["a0", "a1"]


@pytest.mark.parametrize(
    ("is_of_another_base", "reason"),
    [
        pytest.param(True, "adapter_model.safetensors: tensor ", marks=pytest.mark.nightly),
        (False, "is NaN or infinite: train or save it again"),
    ],
)
def test_a_start_with_a_bad_adapter_exits_with_2_and_one_line(
    tmp_path: Path, is_of_another_base: bool, reason: str
) -> None:
    if is_of_another_base:
        bad = write_adapter(tmp_path / "bad")
    else:
        (bad,) = write_adapters(tmp_path / "adapters", DEMO_FOLDER, 1)
        file = bad / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", math.nan))
    with LaunchedEngine(tmp_path, "--enable-lora", "--lora-modules", f"bad={bad}") as engine:
        assert engine.wait_exit() == 2
    (line,) = (line for line in engine.errors.read_text().splitlines() if "INFO" not in line)
    assert "--lora-modules bad: " in line and str(bad) in line and reason in line
