"""Measure the cost of JSON masks: N requests that all follow a schema, beside the same requests without one.

    engine-launch bench grammar 135m 16 32 128

Both generate exactly OUT tokens per request from the same prompts, greedily without --temperature (a mask leaves
fewer candidates to draw from, which is cheaper); the schema (a list of 10,000 records) cannot end before.
Measured in turn (A B A B), after a warm-up of each; the ratio is the median of the rounds' ratios.

A checkpoint of make_checkpoint.py has a vocabulary of bytes, for which masks are cheap: so a byte-level BPE of
the model's whole vocabulary is trained from the Python library's own sources, once, and used instead.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenloom import LLM, StructuredOutputsParams
from tokenloom.scripts.bench.contestant import Ours, measure_in_turn, median_ratio
from tokenloom.scripts.bench.runner import Case, Setup

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "tags", "active"],
        "additionalProperties": False,
    },
}


def find_tokenizer(folder: Path, size: int) -> Path:
    """Return a folder with a tokenizer: the model's own if that has more than half of `size` tokens, else one of `size`
    tokens, trained once and kept beside the model."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if own.get_vocab_size() > size // 2:
        return folder
    trained = folder.parent / f"bpe-{size}"
    if not (trained / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:4000]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|begin|>", "<|end|>"]
        tokenizer.train_from_iterator(
            (path.read_text(encoding="utf-8", errors="ignore") for path in sources),  # not all of them are UTF-8
            trainers.BpeTrainer(
                vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            ),
        )
        trained.mkdir(exist_ok=True)
        tokenizer.save(str(trained / "tokenizer.json"))
    return trained


def measure(setup: Setup) -> None:
    asked, options = setup.arguments, setup.options
    options.setdefault("tokenizer", str(find_tokenizer(setup.folder, setup.workload.vocab_size)))
    llm = setup.stack.enter_context(LLM(setup.folder, in_process=asked.in_process, **options))
    plain = Ours(llm, "plain", temperature=asked.temperature, seed=0)
    schema = StructuredOutputsParams(json=SCHEMA)
    masked = Ours(llm, "JSON", temperature=asked.temperature, seed=0, structured_outputs=schema)
    seconds = measure_in_turn([plain, masked], setup.workload, asked.rounds, setup.report, "answers")
    ratio = median_ratio(seconds["plain"], seconds["JSON"])
    setup.report.note("throughput with JSON masks relative to that without", ratio)


OPTIONS = {
    "--temperature": (0.0, "sampling temperature of both kinds"),
    "--in-process": (False, "run the engine in this process"),
}
CASE = Case("JSON masks", measure, OPTIONS, num_requests=16)
