"""`engine-launch bench [NAME …]`: runs scripts/bench/cases/NAME.py with its own arguments."""

from __future__ import annotations

import argparse
import difflib
import importlib

from .command import list_commands
from .engines import is_address

BENCHMARKS = {  # description by name; each is scripts/bench/cases/NAME.py
    "throughput": "many prompts at once, offline; beside transformers' generate",
    "pooling": "embeddings and scores of many texts; beside sentence-transformers and onnxruntime",
    "latency": "one request alone: time to the first token and between tokens",
    "mixed": "a prompt with a cached prefix; a long prompt beside decoding requests",
    "flex": "a batch of the flex class beside random arrivals, and alone",
    "serve": "random arrivals at a running engine",
    "startup": "from the command to the first token; memory and idle CPU",
    "engine": "the engine's own cost, without a model",
    "sse": "the server's cost of a streamed token, without a model",
    "recovery": "from the kill of a process to the next token of a stream",
    "served": "random arrivals over HTTP, by the client of vLLM, at this engine and at vLLM in turn",
    "compare": "tokenloom, transformers, vLLM, llama.cpp and the limits of the machine",
    "gguf": "a GGUF file beside llama.cpp's own programs: prompts, decode, many requests",
    "slots": "a GGUF file under load over HTTP, beside llama-server with slots",
    "kernels": "the CPU kernels over whole models",
    "states": "the CPU operations of layers with a state beside transformers' torch forms",
    "hybrids": "models in which layers keep a state: as one call a step, layer by layer, and on transformers' layers",
    "packing": "the packing of quantized weights, from the blocks of a file and in plain torch",
    "sampling": "the cost of sampling parameters",
    "grammar": "the cost of structured output",
    "masks": "the masks of calls in a model's own form, by the size of the vocabulary",
    "reading": "the reading of thoughts, prose and calls in an answer, by the form of the calls",
    "tools": "calls that conform to their schemas, with and without strict, and what that costs",
    "lora": "batches of LoRA adapters beside the base model; loads, many adapters over few slots, and peft",
    "speculation": "lookup speculation on and off, with texts of this repository: needs a checkout",
    "multimodal": "requests with images: encodes, first token, the stall of others, throughput, memory",
    "uploads": "how long images of 20 MB hold the frontend's loop",
    "ray": "an engine on Ray beside one of --hosts: needs a checkout, root and Ray",
    "scale": "an engine over two hosts beside one host: needs a checkout and root",
    "router": "the choice between cores: seconds by their number, and memory of the index",
    "replicas": "two replicas with a thread each beside one engine with two threads",
    "gateway": "what a gateway adds to the first token, and the gap of a stream whose core is killed",
    "tiers": "the first token of a prompt whose KV blocks lie in each tier",
    "tiers_load": "requests with and without a disk tier that takes every block",
    "groups": "how KV groups use the memory, without a model",
    "conversation": "the tokens of a growing conversation that are computed again",
    "tier_throttle": "the first token of prompts whose KV blocks come from a slow source",
    "tier_stores": "the stores of KV blocks by themselves; beside LMCache's",
}
SERVE = "serve"
DESCRIPTION = (
    "Run a benchmark. Without a name it is serve, at the engine that runs. Each has its own --help:\n\n"
    + list_commands(BENCHMARKS)
)
EXAMPLES = [
    "",
    "serve http://localhost:8000 --rate 1 2 4",
    "throughput 135m 32 128 64 --with-transformers",
    "latency ./Qwen3-0.6B 128 64",
    "serve --help",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "one of the benchmarks above, or the address of an engine for serve"
    parser.add_argument("benchmark", nargs="?", default=SERVE, type=_known, metavar="NAME", help=text)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    runner = importlib.import_module("tokenloom.scripts.bench.runner")  # no room may import scripts
    name: str = arguments.benchmark
    words: list[str] = arguments.arguments
    if is_address(name):
        name, words = SERVE, [name, *words]
    return int(runner.run_named(name, words))


def _known(text: str) -> str:
    """Return the name of a benchmark or an address; ArgumentTypeError if it is neither."""
    if text in BENCHMARKS or is_address(text):
        return text
    close = difflib.get_close_matches(text, BENCHMARKS, 1)
    mend = f"did you mean {close[0]}?" if close else f"they are {', '.join(BENCHMARKS)}"
    raise argparse.ArgumentTypeError(f"{text} is no benchmark: {mend}")
