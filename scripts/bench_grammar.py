"""What JSON masks cost: throughput of N requests that all follow a schema, next to the same requests without one.

    python scripts/bench_grammar.py 135m 16 32 128

Both generate exactly OUT tokens per request from the same prompts, greedily unless --temperature says otherwise (a mask
leaves a draw fewer candidates and so makes it cheaper); the schema (a list of 10,000 records) cannot end before.
Measured in turn (A B A B), after a warm-up of each; the ratio is the median of the rounds' ratios.

A checkpoint of make_checkpoint.py has a vocabulary of bytes, for which masks are cheap: so a byte-level BPE of
the model's whole vocabulary is trained from the Python library's own sources, once, and used instead.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenloom import LLM, SamplingParams, StructuredOutputsParams
from tokenloom.scripts.bench_report import Report, add_json_argument, median
from tokenloom.scripts.bench_workload import (
    Workload,
    add_model_arguments,
    add_shape_arguments,
    device_of,
    engine_options,
    find_checkpoint,
    vocab_size,
)

WARM_UP_TOKENS = 8
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
    """A folder with a tokenizer of the whole vocabulary: the model's own, or one trained for it and kept beside it."""
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
            (path.read_text(encoding="utf-8", errors="ignore") for path in sources),  # some are of other encodings
            trainers.BpeTrainer(
                vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
            ),
        )
        trained.mkdir(exist_ok=True)
        tokenizer.save(str(trained / "tokenizer.json"))
    return trained


def seconds_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begun
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    assert lengths == {params.max_tokens}, f"answers ended early: {lengths}"
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_shape_arguments(parser, num_requests=16)
    parser.add_argument("--temperature", type=float, default=0.0, help="of both (default 0)")
    parser.add_argument("--in-process", action="store_true", help="run the engine in this process")
    add_json_argument(parser)
    arguments = parser.parse_args()
    options = engine_options(parser, arguments)
    folder = find_checkpoint(arguments.checkpoint)
    size = vocab_size(folder)
    options.setdefault("tokenizer", str(find_tokenizer(folder, size)))
    workload = Workload(arguments.num_requests, arguments.num_in, arguments.num_out, size)
    settings = {
        "model": arguments.checkpoint,
        "device": device_of(options),
        "N": workload.num_requests,
        "IN": workload.num_in,
        "OUT": workload.num_out,
        "temperature": arguments.temperature,
    }
    report = Report("JSON masks", settings)
    plain = SamplingParams(temperature=arguments.temperature, max_tokens=workload.num_out, seed=0, ignore_eos=True)
    contestants = {"plain": plain, "JSON": plain.replace(structured_outputs=StructuredOutputsParams(json=SCHEMA))}
    ratios = []
    with LLM(folder, in_process=arguments.in_process, **options) as llm:
        for params in contestants.values():
            seconds_of(llm, workload.prompts(seed=-1), params.replace(max_tokens=WARM_UP_TOKENS))
        for round_number in range(arguments.rounds):
            seconds = {}
            for name, params in contestants.items():
                seconds[name] = seconds_of(llm, workload.prompts(seed=round_number), params)
                tokens_per_s = workload.num_requests * workload.num_out / seconds[name]
                report.add(round=round_number + 1, answers=name, seconds=seconds[name], out_tokens_per_s=tokens_per_s)
            ratios.append(seconds["plain"] / seconds["JSON"])
    report.note("throughput with JSON masks, of that without", median(ratios))
    report.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
