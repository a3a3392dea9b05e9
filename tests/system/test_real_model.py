"""A published model, SmolLM2-135M-Instruct, answers as transformers does on its weights, and sensibly.

Greedy tokens are compared by transformers' logits on the prompt and the whole answer: each token is the one with the
largest, so that its own greedy answer is the same.
"""

from __future__ import annotations

import contextlib
import json
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import samples
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.real_model import logprobs_of, model_file, needs_real_model, reference

pytestmark = [needs_real_model, pytest.mark.timeout(300)]

NUM_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a little",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "1, 2, 3, 4, 5,",
    "The year 1969 is known for",
    "Water boils at 100 degrees",
    "To be, or not to be,",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to",
    "Der schnelle braune Fuchs",
    "Les enfants jouent dans",
    "東京は日本の",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "Q: What is 12 + 30?\nA:",
    "The three primary colours are",
    "A week has seven days: Monday, Tuesday,",
    "In 1492, Christopher Columbus sailed 3,000 miles 😀 and",
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer", "minimum": 0}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
COPY = "The parcel was sent from Lima to Oslo on the fourth of May, and it arrived in Oslo on the ninth of May. "


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedEngine]:
    options = ["--model", str(model_file()), "--dtype", "float32", "--http", "0", "--max-model-len", "1024"]
    options += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--max-num-seqs", "32"]
    with LaunchedEngine(tmp_path_factory.mktemp("e"), *options) as engine:
        engine.wait_ready()
        yield engine
        assert engine.stop() == 0


@pytest.fixture
def http(engine: LaunchedEngine) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=engine.url, timeout=120.0) as http:
        yield http


@pytest.fixture(scope="module")
def answers(engine: LaunchedEngine) -> list[RequestOutput]:
    """Greedy answers to all prompts, computed in one batch."""
    with Client(engine.address) as client:
        return client.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_greedy_tokens_and_logprobs_are_those_of_transformers(answers: list[RequestOutput]) -> None:
    wrong: list[str] = []
    pairs = [(found.prompt_token_ids, found.outputs[0].token_ids) for found in answers]
    for prompt, found, expected in zip(PROMPTS, answers, logprobs_of(pairs), strict=True):
        (answer,) = found.outputs
        if expected.argmax(-1).tolist() != list(answer.token_ids):
            wrong.append(f"{prompt!r}: other tokens: {answer.text!r}")
        for place, given in enumerate(answer.logprobs or ()):
            differences = [abs(each.logprob - float(expected[place, token])) for token, each in given.items()]
            if max(differences) > 2e-3 or len(given) < 5:
                wrong.append(f"{prompt!r}: logprobs of token {place} are off by {max(differences)}")
    assert not wrong
    assert "Paris" in answers[0].outputs[0].text


def test_texts_come_back_from_their_tokens(engine: LaunchedEngine) -> None:
    with Client(engine.address) as client:
        assert [client.detokenize(client.tokenize(prompt)) for prompt in PROMPTS] == PROMPTS


def test_a_chat_is_answered(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 40}
    choice = choice_of(http, body)
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    events = http.post("/v1/chat/completions", json=body | {"temperature": 0, "stream": True}).text.split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event.startswith("data: {")]
    assert "".join(piece.get("content") or "" for piece in pieces) == choice["message"]["content"]


def test_a_tool_is_called_with_arguments_of_its_schema(http: httpx2.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "How warm is it in Oslo?"}],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    choice = choice_of(http, body)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["parameters"])


def test_an_answer_in_a_schema_is_valid(http: httpx2.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        "max_tokens": 100,
    }
    jsonschema.validate(json.loads(choice_of(http, body)["message"]["content"]), CITY)


def choice_of(http: httpx2.Client, body: dict[str, Any]) -> Any:
    """Return the greedy answer to a chat."""
    response = http.post("/v1/chat/completions", json=body | {"temperature": 0})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def check_greedy(found: RequestOutput) -> None:
    """Check that the only answer of an output is transformers' greedy one."""
    answer = list(found.outputs[0].token_ids)
    (expected,) = logprobs_of([(found.prompt_token_ids, answer)])
    assert expected.argmax(-1).tolist() == answer


def test_guessed_tokens_are_accepted_and_change_nothing(engine: LaunchedEngine, http: httpx2.Client) -> None:
    """A busy machine makes guesses dear, and then few are made for one answer."""

    def has_accepted() -> bool:
        (found,) = client.generate(COPY * 4, GREEDY.replace(max_tokens=40), use_tqdm=False)
        check_greedy(found)
        values = samples(http).items()
        return sum(value for name, value in values if name.startswith("tokenloom_spec_accepted_total")) > 5

    with Client(engine.address) as client:
        wait_until(has_accepted)


@pytest.mark.parametrize("role", some(["worker 0", "core", "frontend"], num_today=1))
def test_a_killed_process_changes_no_answer(engine: LaunchedEngine, role: str) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=24, ignore_eos=True)
    with Client(engine.address, reconnect_timeout_s=120) as client:
        calm = "".join(client.stream(PROMPTS[1], params))
        pieces: list[str] = []
        for piece in client.stream(PROMPTS[1], params):
            pieces.append(piece)
            if len(pieces) == 8:
                engine.child(role).send_signal(signal.SIGKILL)
    assert "".join(pieces) == calm


def test_an_adapter_answers_as_peft_does(engine: LaunchedEngine, tmp_path: Path) -> None:
    params = GREEDY.replace(ignore_eos=True)
    with Client(engine.address) as client:
        with random_adapter(tmp_path / "random"):
            client.load_adapter("random", str(tmp_path / "random"))
            (adapted,) = client.generate(PROMPTS[0], params, model="random", use_tqdm=False)
            check_greedy(adapted)
            client.unload_adapter("random")
        (plain,) = client.generate(PROMPTS[0], params, use_tqdm=False)
        check_greedy(plain)
    assert adapted.outputs[0].text != plain.outputs[0].text


@contextlib.contextmanager
def random_adapter(folder: Path) -> Iterator[None]:
    """Save a LoRA adapter with random weights; the reference has it meanwhile."""
    import peft
    import torch

    modules = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers is about to drop
        model = peft.get_peft_model(reference(), config).eval()
    try:
        model.save_pretrained(folder, save_embedding_layers=False)
        yield
    finally:
        model.unload()
