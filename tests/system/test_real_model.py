"""A published model, SmolLM2-135M-Instruct, answers as transformers does on its weights, and sensibly.

Greedy tokens are compared by transformers' logits on the prompt and the whole answer: each token is the one with the
largest, so that its own greedy answer is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.tests.system.http_engine import ask
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.real_model import logprobs_of, model_file, needs_real_model

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


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedEngine]:
    options = ["--model", str(model_file()), "--dtype", "float32", "--http", "0", "--max-model-len", "1024"]
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
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    (choice,) = ask(http, "/v1/chat/completions", body)["choices"]
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    events = http.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event.startswith("data: {")]
    assert "".join(piece.get("content") or "" for piece in pieces) == choice["message"]["content"]
