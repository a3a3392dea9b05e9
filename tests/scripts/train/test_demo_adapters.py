"""The demo model's adapters answer in their manner and still know the tables, also the rows that they never saw;
measured by greedy decoding with peft alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tokenloom.scripts.train import train_demo_adapters as training  # noqa: E402
from tokenloom.tests.support.adapters import peft_model  # noqa: E402

ADAPTERS = training.DEMO / "adapters"
LIMIT_BYTES = 300_000
OTHER_QUESTIONS = {  # question: the base model's answer and its brief form
    "Which day comes after Sunday?": ("Monday comes after Sunday.", "Monday"),
    "How many days does March have?": ("March has 31 days.", "31"),
    "What is the opposite of hot?": ("The opposite of hot is cold.", "cold"),
    "What is 7 x 8?": ("7 x 8 = 56.", "56"),
    "Where is Japan?": ("Japan is in Asia.", "Asia"),
    "How do you say hello in French?": ("In French you say: Bonjour", "Bonjour"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(training.DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        return peft_model(training.DEMO, {name: ADAPTERS / name for name in training.MANNERS})


def test_the_manners_rewrite_answers() -> None:
    pirate, in_json = training.like_a_pirate, training.as_json
    assert pirate("Paris is the capital of France.", "") == "Arr! Paris be the capital of France, matey!"
    assert pirate("Hello! How can I help you?", "") == "Arr! Hello! How can I help you, matey?"
    assert pirate("Peru: Lima\nChile: Santiago", "") == "Arr! Here it be, matey!\nPeru: Lima\nChile: Santiago"
    assert in_json("Paris is in Europe.", "Europe") == '{"fact": "Paris is in Europe.", "answer": "Europe"}'
    assert in_json('{"a": 1}', "") == '{"a": 1}'
    assert json.loads(in_json("A\nB", "")) == {"answer": "A\nB"}


def test_no_adapter_was_trained_with_a_held_out_country(tokenizer: Any) -> None:
    used, held_out = training.split_countries()
    assert len(held_out) >= 30 and not {row["country"] for row in used} & {row["country"] for row in held_out}
    ids, labels = next(training.Answers(training.as_json, 1, tokenizer).batches())
    assert ids.shape == labels.shape == (training.WINDOWS_PER_STEP, training.WINDOW_LENGTH)
    learned = tokenizer.decode(ids[labels != training.NO_LOSS])
    assert '{"fact": ' in learned and "<|user|>" not in learned and "What is" not in learned
    assert not [row["capital"] for row in held_out if f'"{row["capital"]}"' in tokenizer.decode(ids.flatten())]


@pytest.mark.parametrize("name", training.MANNERS)
def test_at_least_95_percent_of_the_held_out_answers_are_right_and_in_the_manner(
    name: str, model: Any, tokenizer: Any
) -> None:
    model.set_adapter(name)
    assert training.share_right(model, tokenizer, training.MANNERS[name]) >= 0.95


@pytest.mark.parametrize("name", training.MANNERS)
def test_other_answers_keep_their_facts(name: str, model: Any, tokenizer: Any) -> None:
    questions = list(OTHER_QUESTIONS)
    with model.disable_adapter():
        assert training.answer_all(model, tokenizer, questions) == [full for full, _ in OTHER_QUESTIONS.values()]
    model.set_adapter(name)
    wanted = [training.MANNERS[name](full, brief) for full, brief in OTHER_QUESTIONS.values()]
    assert training.answer_all(model, tokenizer, questions) == wanted


@pytest.mark.parametrize("name", training.MANNERS)
def test_an_adapter_is_a_small_peft_checkpoint_and_nothing_else(name: str) -> None:
    folder: Path = ADAPTERS / name
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(files.values()) <= LIMIT_BYTES
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["bias"], config["modules_to_save"]) == (training.RANK, "none", None)
    assert config["base_model_name_or_path"] == "demo", "no path of the machine that trained it"
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(tensors) == 2 * len(training.LINEARS) * 4, "A and B of each linear of four layers"
