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

import httpx2
import jsonschema
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.tests.support.real_model import logprobs_of, model_file, needs_real_model, reference
from tokenloom.tests.system.http_engine import samples
from tokenloom.tests.system.launched import LaunchedEngine

pytestmark = [needs_real_model, pytest.mark.timeout(300)]

NUM_TOKENS = 24
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
    for prompt, found in zip(PROMPTS, answers, strict=True):
        (answer,) = found.outputs
        expected = logprobs_of(reference(), found.prompt_token_ids, answer.token_ids)
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
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 40}
    model = http.get("/v1/models").json()["data"][0]["id"]
    answer = http.post("/v1/chat/completions", json=body | {"model": model}).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = http.post("/v1/chat/completions", json=body | {"model": model, "stream": True}).text.split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event.startswith("data: {")]
    assert "".join(piece.get("content") or "" for piece in pieces) == answer["choices"][0]["message"]["content"]


def test_a_tool_is_called_with_arguments_of_its_schema(http: httpx2.Client) -> None:
    body = {
        "model": http.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "How warm is it in Oslo?"}],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["parameters"])


def test_an_answer_in_a_schema_is_valid(http: httpx2.Client) -> None:
    body = {
        "model": http.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        "temperature": 0,
        "max_tokens": 100,
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


def test_guessed_tokens_are_accepted_and_change_nothing(engine: LaunchedEngine, http: httpx2.Client) -> None:
    with Client(engine.address) as client:
        (found,) = client.generate(COPY * 4, GREEDY.replace(max_tokens=64), use_tqdm=False)
    (answer,) = found.outputs
    accepted = [value for name, value in samples(http).items() if name.startswith("tokenloom_spec_accepted_total")]
    assert sum(accepted) > 5
    expected = logprobs_of(reference(), found.prompt_token_ids, answer.token_ids)
    assert expected.argmax(-1).tolist() == list(answer.token_ids)


@pytest.mark.parametrize("role", ["worker 0", "core", "frontend"])
def test_a_killed_process_changes_no_answer(engine: LaunchedEngine, role: str) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=48, ignore_eos=True)
    with Client(engine.address, reconnect_timeout_s=120) as client:
        calm = "".join(client.stream(PROMPTS[1], params))
        pieces: list[str] = []
        for piece in client.stream(PROMPTS[1], params):
            pieces.append(piece)
            if len(pieces) == 8:
                engine.child(role).send_signal(signal.SIGKILL)
    assert "".join(pieces) == calm


def test_a_trained_adapter_answers_as_peft_does(engine: LaunchedEngine, tmp_path: Path) -> None:
    prompt, lesson = "The name of our ship is", " Blue Heron, and it sails at noon."
    with Client(engine.address) as client:
        ids, wanted = client.tokenize(prompt), client.tokenize(lesson)
        with trained_adapter(tmp_path / "ship", ids, wanted) as model:
            client.load_adapter("ship", str(tmp_path / "ship"))
            params = SamplingParams(temperature=0, max_tokens=len(wanted))
            (taught,) = client.generate(prompt, params, model="ship", use_tqdm=False)
            (plain,) = client.generate(prompt, params, use_tqdm=False)
            answer = list(taught.outputs[0].token_ids)
            assert logprobs_of(model, ids, answer).argmax(-1).tolist() == answer
        client.unload_adapter("ship")
    assert taught.outputs[0].text == lesson != plain.outputs[0].text
    expected = logprobs_of(reference(), ids, plain.outputs[0].token_ids)
    assert expected.argmax(-1).tolist() == list(plain.outputs[0].token_ids)


@contextlib.contextmanager
def trained_adapter(folder: Path, prompt: list[int], wanted: list[int]) -> Iterator[object]:
    """Train a LoRA adapter until the model continues a prompt as wanted, save it, and yield peft's model with it."""
    import peft
    import torch

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers is about to drop
        model = peft.get_peft_model(reference(), config)
    try:
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
        inputs = torch.tensor([[*prompt, *wanted]])
        labels = torch.tensor([[*(-100 for _ in prompt), *wanted]])
        for _ in range(40):
            loss = model(inputs, labels=labels).loss
            if loss.item() < 0.02:
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder, save_embedding_layers=False)
        yield model
    finally:
        model.unload()
