"""The demo model knows its tables: the shipped checkpoint, measured by greedy decoding with transformers alone.

These tests know nothing of the engine. They check the properties that its tests rely on: real answers, peaked
distributions, an end token after each answer.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DEMO = Path(__file__).resolve().parents[3] / "demo"

Country = dict[str, str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def countries() -> list[Country]:
    with (DEMO / "facts" / "countries.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def complete(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int, is_chat: bool = False) -> list[str]:
    """Return greedy continuations with their special tokens, without the padding after the end."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not is_chat)
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [answer.split(tokenizer.pad_token)[0] for answer in answers]


def chat(model: Any, tokenizer: Any, *messages: tuple[str, str], max_new_tokens: int = 40) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return complete(model, tokenizer, [prompt], max_new_tokens, is_chat=True)[0]


def test_the_table_names_each_country_once(countries: list[Country]) -> None:
    assert len({row["country"] for row in countries}) == len(countries) >= 180
    assert len({row["capital"] for row in countries}) == len(countries)


def test_at_least_95_percent_of_the_capitals_are_right(model: Any, tokenizer: Any, countries: list[Country]) -> None:
    prompts = [f"The capital of {row['article']} {row['country']} is".replace("  ", " ") for row in countries]
    answers = complete(model, tokenizer, prompts, max_new_tokens=24)
    pairs = list(zip(answers, countries, strict=True))
    wrong = [(row["country"], answer) for answer, row in pairs if not answer.startswith(f" {row['capital']}.")]
    assert len(wrong) <= 0.05 * len(countries), wrong
    endless = [answer for answer in answers if not answer.endswith(tokenizer.eos_token)]
    assert len(endless) <= 0.05 * len(countries), endless


def test_at_least_95_percent_of_the_small_sums_are_right(model: Any, tokenizer: Any) -> None:
    pairs = [(a, b) for a in range(21) for b in range(21)]
    answers = complete(model, tokenizer, [f"{a} + {b} =" for a, b in pairs], max_new_tokens=6)
    right = [answer == f" {a + b}.{tokenizer.eos_token}" for answer, (a, b) in zip(answers, pairs, strict=True)]
    assert sum(right) >= 0.95 * len(right)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Which country has the capital Lima?", "Lima is the capital of Peru."),
        ("Which day comes after Sunday?", "Monday comes after Sunday."),
        ("Which month comes before January?", "December comes before January."),
        ("What is 12 + 7?", "12 + 7 = 19."),
        ("Give me Japan as JSON.", '{"country": "Japan", "capital": "Tokyo", "continent": "Asia"}'),
        ("How do you say hello in Japanese?", "In Japanese you say: こんにちは"),
    ],
)
def test_a_chat_turn_answers_and_ends_with_an_end_token(model: Any, tokenizer: Any, question: str, answer: str) -> None:
    assert chat(model, tokenizer, ("user", question)) == f"{answer}<|end|>"


def test_answers_follow_the_system_prompt_and_earlier_turns(model: Any, tokenizer: Any) -> None:
    first = ("user", "What is the capital of Italy?")
    assert chat(model, tokenizer, ("system", "Answer with one word."), first) == "Rome<|end|>"
    turns = [first, ("assistant", "The capital of Italy is Rome."), ("user", "And of Spain?")]
    assert chat(model, tokenizer, *turns) == "The capital of Spain is Madrid.<|end|>"


def test_a_long_list_is_complete(model: Any, tokenizer: Any, countries: list[Country]) -> None:
    answer = chat(model, tokenizer, ("user", "List the countries of Europe and their capitals."), max_new_tokens=600)
    lines = [f"{row['country']}: {row['capital']}" for row in countries if row["continent"] == "Europe"]
    written = answer.removesuffix("<|end|>").split("\n")
    assert answer.endswith("<|end|>")
    assert len(set(lines) & set(written)) >= 0.9 * len(lines)


def test_an_answer_far_into_the_context_is_still_right(model: Any, tokenizer: Any, countries: list[Country]) -> None:
    turns = []
    for row in countries[:70]:
        turns.append(("user", f"What is the capital of {row['country']}?"))
        turns.append(("assistant", f"The capital of {row['country']} is {row['capital']}."))
    assert 900 < sum(len(tokenizer.encode(content)) for _, content in turns) < 1400
    answer = chat(model, tokenizer, *turns, ("user", "What is the capital of Norway?"))
    assert answer == "The capital of Norway is Oslo.<|end|>"


@pytest.mark.parametrize(
    ("folder", "architecture", "most_bytes"),
    [
        (DEMO, "LlamaForCausalLM", 10_000_000),  # with its adapters and the models of images and of speech
        (DEMO / "vision", "LlavaForConditionalGeneration", 3_000_000),
        (DEMO / "audio", "WhisperForConditionalGeneration", 3_000_000),
    ],
)
def test_a_checkpoint_is_small_and_has_the_documented_format(folder: Path, architecture: str, most_bytes: int) -> None:
    def read(name: str) -> Any:
        return json.loads((folder / name).read_text(encoding="utf-8"))

    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= most_bytes
    config, tokenizer = read("config.json"), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert config["architectures"] == [architecture]
    assert config.get("text_config", config)["vocab_size"] == len(tokenizer)
    if folder.name != "audio":
        assert read("generation_config.json")["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|eos|>", "<|end|>"])
    if folder == DEMO:
        assert config["max_position_embeddings"] >= 2048
        template = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
        assert read("tokenizer_config.json")["chat_template"] == template == tokenizer.chat_template


def test_a_prompt_begins_with_one_bos_in_text_and_in_chat(tokenizer: Any) -> None:
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("The capital of France is").count(bos) == 1
    turn = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    assert ids[0] == bos
    assert ids.count(bos) == 1


@pytest.mark.parametrize("text", ["plain", "Chișinău, こんにちは", "a\tb\n\n  c", "🙂 emoji", "1234567890"])
def test_any_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
