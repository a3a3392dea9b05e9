"""Train the demo model: a small Llama that knows the tables in demo/facts and nothing else.

The corpus is never stored. Every document is drawn from the tables: a form (``forms.tsv``) is filled with a row and
becomes either plain text that ends with ``<|eos|>`` or a turn of a chat that ends with ``<|end|>``. The same seed,
thread count and torch build give the same checkpoint. The result is in Hugging Face form, in bfloat16, and fits in 6 MB
together with the tables.

    python scripts/train/train_demo_model.py --output demo

This file knows nothing of serving; it needs torch, transformers and tokenizers, and nothing of tokenloom.
tests/scripts/train/test_demo_model.py measures the model's knowledge.
"""

import argparse
import csv
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from string import Template
from typing import Any, cast

import jinja2
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Row = dict[str, str]
RowMaker = Callable[[Random], Row]
Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and labels, which differ where no loss is taken: -100 there

FACTS = Path(__file__).resolve().parents[2] / "demo" / "facts"

BOS, EOS, END, PAD = "<|bos|>", "<|eos|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = [BOS, EOS, END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the demo model knows the roles system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
TOKENS_PER_STEP = 4096
# Short windows train fastest, since attention dominates on a CPU; the long ones train the far positions.
WINDOW_LENGTHS = [256] * 7 + [512] * 2 + [2048]
PEAK_LEARNING_RATE = 3e-3


def read_table(name: str) -> list[Row]:
    """Return the rows of demo/facts/<name>.tsv by column; a written ``\\n`` stands for a line break."""
    with (FACTS / f"{name}.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [{column: value.replace("\\n", "\n") for column, value in row.items()} for row in rows]


def read_countries() -> list[Row]:
    """Return the countries with ``place``, the name inside a sentence ("the Gambia"), and ``Place``, at its start.

    The table omits countries whose capital is disputed, divided or moving; continents are those of UN M49.
    """
    countries = read_table("countries")
    for row in countries:
        row["place"] = f"{row['article']} {row['country']}".strip()
        row["Place"] = row["place"][0].upper() + row["place"][1:]
    return countries


def read_cycle(name: str, column: str) -> list[Row]:
    """Return days or months, each with its neighbours; the last is followed by the first."""
    rows = read_table(name)
    names = [row[column] for row in rows]
    for index, row in enumerate(rows):
        following = names[(index + 1) % len(names)]
        row |= {"this": names[index], "previous": names[index - 1], "next": following, "number": str(index + 1)}
    return rows


def sum_row(rng: Random) -> Row:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    low, high = sorted((a, b))
    numbers = {"a": a, "b": b, "sum": a + b, "low": low, "high": high, "difference": high - low}
    return {name: str(number) for name, number in numbers.items()}


def product_row(rng: Random) -> Row:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return {"a": str(a), "b": str(b), "product": str(a * b)}


def count_row(rng: Random) -> Row:
    first = rng.choice([0, 1, 1, 1, rng.randint(2, 60)])
    last = rng.choice([10, 20, 50, 100, rng.randint(first + 3, 100)])
    if last <= first + 3:
        last = first + 10
    numbers = [str(number) for number in range(first, last + 1)]
    return {
        "first": numbers[0],
        "last": numbers[-1],
        "numbers": ", ".join(numbers),
        "reversed": ", ".join(reversed(numbers)),
    }


def times_row(rng: Random) -> Row:
    factor = rng.randint(1, 10)
    lines = [f"{number} x {factor} = {number * factor}" for number in range(1, 11)]
    return {"factor": str(factor), "lines": "\n".join(lines)}


@dataclass
class Corpus:
    """Draws documents. Owns the tables and the random stream: the order of the calls decides the results."""

    rng: Random
    countries: list[Row] = field(default_factory=read_countries)
    days: list[Row] = field(default_factory=lambda: read_cycle("days", "day"))
    months: list[Row] = field(default_factory=lambda: read_cycle("months", "month"))

    def __post_init__(self) -> None:
        tables = {"countries": self.countries, "days": self.days, "months": self.months}
        for name in ("elements", "opposites", "young", "greetings", "small_talk", "names"):
            tables[name] = read_table(name)
        self._makers: dict[str, RowMaker] = {name: self._chooser(rows) for name, rows in tables.items()}
        self._makers |= {"sums": sum_row, "products": product_row, "counts": count_row, "times": times_row}
        self._makers |= {"lists": self._list_row, "samples": self._sample_row, "diaries": self._diary_row}
        self._makers |= {"calendar": self._calendar_row, "names": self._name_row(tables["names"])}
        self.forms: dict[str, list[Row]] = {}  # by kind
        for form in read_table("forms"):
            self.forms.setdefault(form["kind"], []).append(form)
        self.system_prompts = read_table("system_prompts")
        self._chat_template = jinja2.Environment().from_string(CHAT_TEMPLATE)

    def document(self) -> str:
        """Draw one document with all its special tokens, from BOS to its end."""
        if self.rng.random() < 0.5:
            return self._text()
        messages = self._chat()
        return self._chat_template.render(messages=messages, bos_token=BOS)

    def _text(self) -> str:
        prompt, answer, _ = self.fill("text")
        joint = "" if answer.startswith("\n") else " "
        return f"{BOS}{prompt}{joint}{answer}{EOS}"

    def _chat(self) -> list[Row]:
        """Draw one to four turns, at times under a system prompt; half of the system prompts ask for brief answers."""
        messages: list[Row] = []
        style = "full"
        if self.rng.random() < 0.5:
            style = self.rng.choice(["full", "brief"])
            system = self.rng.choice([row["system"] for row in self.system_prompts if row["style"] == style])
            messages.append({"role": "system", "content": system})
        kind = "chat"
        for _ in range(self.rng.choice([1, 1, 1, 2, 3, 4])):
            question, answer, brief = self.fill(kind)
            messages.append({"role": "user", "content": self.roughen(question)})
            messages.append({"role": "assistant", "content": brief if style == "brief" and brief else answer})
            # "And of Spain?" can only follow a question for a capital.
            asked_capital = answer.startswith("The capital of ")
            kind = "follow" if asked_capital and self.rng.random() < 0.5 else "chat"
        return messages

    def fill(self, kind: str) -> tuple[str, str, str]:
        """Draw a form of a kind with its row: prompt, answer, and brief answer, which may be empty."""
        forms = self.forms[kind]
        form = self.rng.choices(forms, [int(each["weight"]) for each in forms])[0]
        row = self._makers[form["table"]](self.rng)
        prompt, answer, brief = (Template(form[column]).substitute(row) for column in ("prompt", "answer", "brief"))
        return prompt, answer, brief

    def roughen(self, question: str) -> str:
        """Vary a question like human typing: some in lower case, some without the question mark."""
        if self.rng.random() < 0.1:
            question = question.lower()
        if self.rng.random() < 0.1:
            question = question.rstrip("?.")
        return question

    @staticmethod
    def _chooser(rows: list[Row]) -> RowMaker:
        return lambda rng: rng.choice(rows)

    def _name_row(self, names: list[Row]) -> RowMaker:
        return lambda rng: rng.choice(names) | {"capital": rng.choice(self.countries)["capital"]}

    def _continent(self, rng: Random) -> tuple[str, list[Row]]:
        continent = rng.choice(sorted({row["continent"] for row in self.countries}))
        return continent, [row for row in self.countries if row["continent"] == continent]

    def _list_row(self, rng: Random) -> Row:
        continent, rows = self._continent(rng)
        lines = "\n".join(f"{row['country']}: {row['capital']}" for row in rows)
        return {"continent": continent, "lines": lines, "names": ", ".join(row["country"] for row in rows)}

    def _sample_row(self, rng: Random) -> Row:
        continent, rows = self._continent(rng)
        names = [row["Place"] if index == 0 else row["place"] for index, row in enumerate(rng.sample(rows, 3))]
        keys = ("country", "capital")
        records = [{key: row[key] for key in keys} for row in rng.sample(self.countries, 3)]
        in_json = json.dumps(records, ensure_ascii=False)
        return {"continent": continent, "one": names[0], "three": ", ".join(names), "json": in_json}

    def _diary_row(self, rng: Random) -> Row:
        """Draw a travel diary of a week or two: long, and different at every draw."""
        start = rng.randrange(7)
        stops = rng.sample(self.countries, rng.randint(7, 14))
        lines = [
            f"On {self.days[(start + index) % 7]['day']} I came to {stop['capital']}, the capital of {stop['place']}."
            for index, stop in enumerate(stops)
        ]
        return {"diary": "\n".join([*lines, "Then I went home."])}

    def _calendar_row(self, _: Random) -> Row:
        days = [row["day"] for row in self.days]
        months = [row["month"] for row in self.months]
        return {
            "days": ", ".join(days),
            "days_after": ", ".join(days[1:]),
            "months": ", ".join(months),
            "months_after": ", ".join(months[1:]),
            "lengths": "\n".join(f"{row['month']}: {row['length']}" for row in self.months),
        }


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a sample of the corpus: any text can be encoded, the tables' words get few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = Corpus(Random(seed))
    tokenizer.train_from_iterator((corpus.document() for _ in range(30_000)), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    add_bos = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), add_bos])
    # transformers leaves the constructor untyped.
    wrapped: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (BOS, EOS, PAD)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    return wrapped


def windows(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Yield batches of token ids, [num_windows, window length]; a window starts with a document and cuts its last."""
    while True:
        length = corpus.rng.choice(WINDOW_LENGTHS)
        batch = []
        for _ in range(TOKENS_PER_STEP // length):
            window: list[int] = []
            while len(window) < length:
                window += tokenizer.encode(corpus.document(), add_special_tokens=False)
            batch.append(window[:length])
        ids = torch.tensor(batch)
        yield ids, ids


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # A text ends with EOS, a turn of a chat with END; either ends a generation.
    model.generation_config = cast(Any, GenerationConfig)(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in (EOS, END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Return a step's learning rate: a short linear warm-up, then half a cosine down to zero."""
    warm_up = min(100, num_steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (num_steps - warm_up)))


def new_optimizer(trained: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return an optimizer that lets only matrices decay."""
    matrices = [each for each in trained if each.dim() >= 2]
    vectors = [each for each in trained if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def train(
    model: torch.nn.Module, batches: Iterator[Batch], num_steps: int, peak_learning_rate: float = PEAK_LEARNING_RATE
) -> None:
    """Train with AdamW under bfloat16 autocast; the master weights stay in float32."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = new_optimizer(trained)
    start = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, peak_learning_rate)
        ids, labels = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss.item():.3f} after {time.monotonic() - start:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Save both beside `output`, then move their files into it."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings_file = Path(folder) / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text(encoding="utf-8"))
        # transformers 5 keeps the template in its own file and renamed the class; other readers expect both here.
        settings |= {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
        settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        move_files(Path(folder), output)


def move_files(folder: Path, output: Path) -> None:
    """Move the files of `folder` one by one, so that a reader of `output` never sees an incomplete one."""
    for file in folder.iterdir():
        file.chmod(0o644)
        shutil.move(file, output / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model from the tables in demo/facts.")
    parser.add_argument("--output", type=Path, default=FACTS.parent, help="folder of the checkpoint (default: demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400, help=f"steps of {TOKENS_PER_STEP} tokens each")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; another number gives other roundings")
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = train_tokenizer(arguments.seed)
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    train(model, windows(Corpus(Random(arguments.seed + 1)), tokenizer), arguments.steps)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    save(model, tokenizer, arguments.output)
    print(f"took {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
