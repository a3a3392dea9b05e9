"""`engine-launch bench NAME …`: the benchmarks, which are scripts of their own and take their own arguments."""

from __future__ import annotations

import argparse
import importlib
import sys

from .command import list_commands

BENCHMARKS = {  # name: what it measures; its script is scripts/bench_NAME.py
    "throughput": "many prompts at once, offline; beside transformers' generate",
    "latency": "one request alone: time to the first token and between tokens",
    "mixed": "a prompt whose beginning is cached; a long prompt among running answers",
    "serve": "requests that arrive at random at a running engine",
    "startup": "from the command to the first token; memory and idle CPU",
    "engine": "the engine's own cost, without a model",
    "sse": "what a streamed token costs the server, without a model",
    "recovery": "from the kill of a process to the next token of a stream",
    "compare": "us beside transformers, vLLM, llama.cpp and what the machine allows",
    "kernels": "the CPU kernels over whole models",
    "sampling": "what sampling parameters cost",
    "grammar": "what structured output costs",
}
DESCRIPTION = "Measure. Each benchmark has a --help of its own:\n\n" + list_commands(BENCHMARKS)
EXAMPLES = ["throughput 135m 32 128 64 --with-transformers", "latency ./Qwen3-0.6B 128 64", "serve --help"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("benchmark", choices=tuple(BENCHMARKS), metavar="NAME", help="one of those above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    sys.argv = [f"engine-launch bench {arguments.benchmark}", *arguments.arguments]
    script = importlib.import_module(f"...scripts.bench_{arguments.benchmark}", __package__)
    return int(script.main())
