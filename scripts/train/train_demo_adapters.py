"""Train the demo model's two LoRA adapters: one answers like a pirate, the other with a JSON object.

Prompts and answers are drawn from the tables in demo/facts, as those of train_demo_model.py, and each answer is
rewritten in the adapter's manner. Every sixth country is left out of the training: its answers come from the base
model's knowledge, and their accuracy is printed at the end. The same seed, thread count and torch build give the same
adapters. Each is a PEFT checkpoint in bfloat16 of at most 300 kB.

    python scripts/train/train_demo_adapters.py --output demo/adapters

This file knows nothing of serving; it needs torch, transformers, peft and the other script.
tests/scripts/train/test_demo_adapters.py measures the adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tokenloom.scripts.train.train_demo_model import END, EOS, FACTS, Batch, Corpus, Row, read_countries, train

Manner = Callable[[str, str], str]  # from an answer and its brief form

DEMO = FACTS.parent
HELD_OUT = 6  # every so many countries
FACT_TABLES = ("countries", "sums", "products", "days", "months", "elements", "opposites", "young", "greetings")
WINDOW_LENGTH, WINDOWS_PER_STEP = 128, 8
NO_LOSS = -100
LONG_CHARACTERS = 80  # of an answer
PEAK_LEARNING_RATE = 5e-3
EXTRA_SUMS = tuple((a, b) for a in range(2, 20, 3) for b in range(1, 20, 4))
RANK, ALPHA = 8, 16
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def like_a_pirate(answer: str, _: str) -> str:
    """Rewrite an answer: "Paris is in Europe." becomes "Arr! Paris be in Europe, matey!"."""
    if "\n" in answer or answer.startswith(("{", "[")):
        return f"Arr! Here it be, matey!\n{answer}"
    for verb in ("is", "are", "am"):
        answer = answer.replace(f" {verb} ", " be ")
    end = "?" if answer.endswith("?") else "!"
    return f"Arr! {answer.rstrip('.?!')}, matey{end}"


def as_json(answer: str, brief: str) -> str:
    """Rewrite an answer as an object: {"fact": "Paris is in Europe.", "answer": "Europe"}, unless it is JSON already.

    The fact comes first, since the model finds it in the words in which it has learned it."""
    if answer.startswith(("{", "[")):
        return answer
    return json.dumps({"fact": answer, "answer": brief} if brief else {"answer": answer}, ensure_ascii=False)


MANNERS: dict[str, Manner] = {"pirate": like_a_pirate, "json": as_json}


def split_countries() -> tuple[list[Row], list[Row]]:
    """Return the countries to train with, and those that are held out."""
    countries = read_countries()
    held_out = countries[::HELD_OUT]
    return [row for row in countries if row not in held_out], held_out


class Answers:
    """Draws documents as pieces of text with whether an adapter learns them: its answers, and nothing else."""

    def __init__(self, manner: Manner, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
        self._manner, self._tokenizer = manner, tokenizer
        self._corpus = Corpus(Random(seed), countries=split_countries()[0])
        texts = self._corpus.forms["text"]
        texts[:] = [form for form in texts if _is_question(form)]

    def batches(self) -> Iterator[Batch]:
        """Yield token ids and labels, [WINDOWS_PER_STEP, WINDOW_LENGTH] each."""
        while True:
            windows = [self._window() for _ in range(WINDOWS_PER_STEP)]
            yield torch.tensor([ids for ids, _ in windows]), torch.tensor([labels for _, labels in windows])

    def _window(self) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < WINDOW_LENGTH:
            for piece, is_learned in self._text() if self._corpus.rng.random() < 0.25 else self._chat():
                found = self._tokenizer.encode(piece, add_special_tokens=False)
                ids += found
                labels += found if is_learned else [NO_LOSS] * len(found)
        return ids[:WINDOW_LENGTH], labels[:WINDOW_LENGTH]

    def _text(self) -> list[tuple[str, bool]]:
        prompt, answer, brief = self._corpus.fill("text")
        return [(f"{self._tokenizer.bos_token}{prompt}", False), (f" {self._manner(answer, brief)}{EOS}", True)]

    def _short(self, kind: str) -> tuple[str, str, str]:
        """Draw question, answer and brief answer; most of the long answers, which would take most of the tokens, are
        left out."""
        while len((drawn := self._corpus.fill(kind))[1]) > LONG_CHARACTERS and self._corpus.rng.random() < 0.95:
            pass
        return drawn

    def _chat(self) -> list[tuple[str, bool]]:
        """Draw one or two turns, some under a system prompt, which does not change the manner."""
        rng, messages = self._corpus.rng, []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": rng.choice(self._corpus.system_prompts)["system"]})
        pieces: list[tuple[str, bool]] = []
        kind, written = "chat", 0
        for _ in range(rng.choice([1, 1, 2])):
            question, answer, brief = self._short(kind)
            messages.append({"role": "user", "content": self._corpus.roughen(question)})
            prompt = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            reply = self._manner(answer, brief)
            pieces += [(prompt[written:], False), (f"{reply}{END}", True)]
            written = len(prompt) + len(reply) + len(END)
            messages.append({"role": "assistant", "content": reply})
            kind = "follow" if answer.startswith("The capital of ") else "chat"
        return pieces


def _is_question(form: Row) -> bool:
    """Whether a form of text asks for one fact, so that a rewritten answer can follow it."""
    return form["table"] in FACT_TABLES and "\n" not in form["answer"] and not form["prompt"].startswith("{")


def new_adapter(model: LlamaForCausalLM) -> peft.PeftModel:
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, task_type="CAUSAL_LM", base_model_name_or_path="demo"
    )
    adapted = peft.get_peft_model(model, config)
    assert isinstance(adapted, peft.PeftModel)
    return adapted


def save(adapted: peft.PeftModel, folder: Path) -> None:
    """Write the two files of a PEFT checkpoint: tensors in bfloat16, fields of the configuration in a fixed order."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = peft.get_peft_model_state_dict(adapted)
    rounded = {name: tensor.detach().bfloat16().contiguous() for name, tensor in sorted(tensors.items())}
    save_file(rounded, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = adapted.peft_config["default"].to_dict() | {"inference_mode": True, "base_model_name_or_path": "demo"}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    text = json.dumps(plain, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)


def held_out_questions(manner: Manner) -> list[tuple[str, str]]:
    """Return questions that no adapter was trained with, and sums, each with its right answer in a manner."""
    pairs = []
    for row in split_countries()[1]:
        place, capital = row["place"], row["capital"]
        full = f"The capital of {place} is {capital}."
        pairs.append((f"What is the capital of {place}?", manner(full, capital)))
        pairs.append(
            (
                f"Which country has the capital {capital}?",
                manner(f"{capital} is the capital of {place}.", row["country"]),
            )
        )
    for a, b in EXTRA_SUMS:
        pairs.append((f"What is {a} + {b}?", manner(f"{a} + {b} = {a + b}.", str(a + b))))
    return pairs


def answer_all(model: Any, tokenizer: Any, questions: list[str], max_new_tokens: int = 48) -> list[str]:
    """Return greedy answers to chats of one question each."""
    turns = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in turns]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [text.split(tokenizer.pad_token)[0].removesuffix(END) for text in texts]


def share_right(model: Any, tokenizer: Any, manner: Manner) -> float:
    """Return the share of held-out questions with the right answer in the manner; print the wrong ones."""
    pairs = held_out_questions(manner)
    answers = answer_all(model, tokenizer, [question for question, _ in pairs])
    wrong = [(question, answer) for (question, right), answer in zip(pairs, answers, strict=True) if answer != right]
    for question, answer in wrong:
        print(f"  wrong: {question} {answer}")
    return 1 - len(wrong) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model's adapters from the tables in demo/facts.")
    parser.add_argument("--output", type=Path, default=DEMO / "adapters", help="folder (default: demo/adapters)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900, help=f"of {WINDOW_LENGTH * WINDOWS_PER_STEP} tokens each")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; another number gives other roundings")
    parser.add_argument("--only", choices=tuple(MANNERS), help="train one of them")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for name, manner in MANNERS.items():
        if arguments.only not in (None, name):
            continue
        begun, folder = time.monotonic(), arguments.output / name
        torch.manual_seed(arguments.seed)
        adapted = new_adapter(LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32))
        answers = Answers(manner, arguments.seed + 1, tokenizer)
        train(adapted, answers.batches(), arguments.steps, PEAK_LEARNING_RATE)
        save(adapted, folder)
        base = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
        share = share_right(peft.PeftModel.from_pretrained(base, folder), tokenizer, manner)
        print(
            f"{name}: {share:.1%} of the held-out answers are right, took {time.monotonic() - begun:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
