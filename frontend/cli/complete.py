"""`engine-launch complete`: streams the completion of one prompt to standard output."""

from __future__ import annotations

import argparse
import sys

from ...ipc.errors import RequestError
from .attach import add_engine_choice, add_sampling, open_engine, sampling_params

DESCRIPTION = "Continue a text: the prompt is the argument, or standard input."
EXAMPLES = ['"The capital of France is"', "--address ipc:///run/loom.sock --temperature 0 < prompt.txt"]
MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the text; none or -: standard input without its last newline"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    add_sampling(parser, MAX_TOKENS)
    add_engine_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt in (None, "-") else arguments.prompt
    if not prompt:
        raise RequestError("the prompt is empty: give it as an argument or on standard input")
    with open_engine(arguments) as engine:
        for text in engine.stream(prompt, sampling_params(arguments, engine.sampling_defaults, MAX_TOKENS)):
            print(text, end="", flush=True)
    print()
    return 0
