"""Train an EAGLE-3 head for a model of llama kind from the model's own answers, within a time.

    scripts/train_draft MODEL --output FOLDER --minutes 60

MODEL is a folder, a GGUF file or `demo`. The time is shared: the engine answers prompts, the model's states of these
texts are computed, the head is trained by the rest. Printed: how much of the answers the draft vocabulary covers, bytes
of a pass through the head beside one through the model, and how often drafts of held-out answers are right, before the
training and at its end. --data keeps the answers, and takes those that are there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from random import Random

import msgspec
import torch
from torch import Tensor
from transformers import LlamaConfig

from tokenloom import LLM
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER, find_checkpoint
from tokenloom.scripts.train import draft_answers
from tokenloom.scripts.train.draft_head import DraftHead
from tokenloom.scripts.train.draft_prompts import Prompt, draw_prompts
from tokenloom.scripts.train.draft_target import Target
from tokenloom.scripts.train.draft_training import Accepted, HeadTraining
from tokenloom.scripts.train.draft_windows import PROMPT, StateFile, Text, Windows, pack
from tokenloom.scripts.train.train_demo_model import Corpus

ANSWERS_SHARE = 0.25  # of the time
STATES_SHARE = 0.3
HELD_OUT = 16  # one window of so many is not trained with
NUM_DRAFTS = 5  # that are measured


def draw_vocabulary(windows: Windows, size: int) -> tuple[Tensor, float]:
    """Return the most frequent tokens of the windows in rising order, and their share of the answers' tokens. Tokens of
    prompts fill the vocabulary only if the answers have too few."""
    vocabulary = Counter[int]()
    answered = Counter(windows.ids[windows.kinds > PROMPT].tolist())
    asked = Counter(windows.ids[windows.kinds == PROMPT].tolist())
    total = sum(asked.values()) + 1
    for token, count in answered.items():
        vocabulary[token] += count * total
    vocabulary.update(asked)
    chosen = [token for token, _ in vocabulary.most_common(size)]
    covered = sum(answered[token] for token in chosen) / max(sum(answered.values()), 1)
    return torch.tensor(sorted(chosen)), covered


def demo_prompts(rng: Random) -> Iterator[Prompt]:
    """Yield prompts of the tables that the demo model was trained with."""
    corpus = Corpus(rng)
    while True:
        yield corpus.fill("text")[0]
        yield [{"role": "user", "content": corpus.roughen(corpus.fill("chat")[0])}]


def prompts_of(asked: argparse.Namespace, folder: Path, rng: Random) -> Iterator[Prompt]:
    if asked.prompts is not None:
        lines = asked.prompts.read_bytes().splitlines()
        return cycle(msgspec.json.decode(line, type=Prompt) for line in lines if line.strip())
    if folder == DEMO_FOLDER:
        return demo_prompts(rng)
    return draw_prompts(rng)


def find_answers(asked: argparse.Namespace, folder: Path, rng: Random, seconds: float) -> list[Text]:
    """Return the kept answers, or new ones, which are kept."""
    path = asked.data / "answers.json"
    if path.exists():
        return draft_answers.load(path)
    asked.data.mkdir(parents=True, exist_ok=True)
    texts: list[Text] = []
    begun = time.monotonic()
    prompts = prompts_of(asked, folder, rng)
    max_model_len = draft_answers.MAX_PROMPT + asked.max_tokens + 1
    with LLM(asked.model, max_model_len=max_model_len, max_num_seqs=draft_answers.AT_ONCE, speculation="off") as llm:
        for some in draft_answers.answers(llm, prompts, seconds, asked.max_tokens, rng, asked.max_texts):
            texts += some
            draft_answers.save(path, texts)
            num_tokens = sum(len(each.answer) for each in texts)
            print(f"{len(texts)} answers, {num_tokens} tokens after {time.monotonic() - begun:.0f} s", flush=True)
    return texts


def find_states(asked: argparse.Namespace, target: Target, windows: Windows, folder: Path, stop: float) -> StateFile:
    """Compute the states of as many windows as the time allows, at least of some."""
    states = StateFile(folder, windows, target.config.hidden_size)
    while states.num_windows < len(windows.ids) and (states.num_windows < 2 * HELD_OUT or time.monotonic() < stop):
        states.add(target, windows, asked.windows)
    print(f"states of {states.num_windows} of {len(windows.ids)} windows of {windows.ids.shape[1]} tokens", flush=True)
    return states


def describe_pass(target: Target, head: DraftHead) -> str:
    """Say how many weights a pass through the head reads beside one through the model."""
    own = sum(each.numel() for each in head.parameters()) - head.fc.weight.numel()
    model = sum(each.numel() for layer in target.layers for each in layer.parameters()) + target.head.numel()
    return (
        f"a pass through the head reads {own} weights, {own / model:.1%} of the model's {model}; "
        f"fc has {head.fc.weight.numel()} more, once a step"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a GGUF file or demo")
    parser.add_argument("--output", type=Path, required=True, help="folder of the head")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that the head can guess")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--max-texts", type=int, default=1_000_000, help="answers, if the time does not end them")
    parser.add_argument("--prompts", type=Path, help="own prompts, as JSON a line: a string or a list of messages")
    parser.add_argument("--data", type=Path, help="folder that keeps answers and states")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="guesses behind each other that are trained")
    parser.add_argument("--max-steps", type=int, default=1_000_000, help="of the training, if time does not end it")
    parser.add_argument("--rate", type=float, default=5e-4, help="the highest learning rate")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    return parser.parse_args(arguments)


def run(arguments: Sequence[str] | None = None) -> tuple[Accepted, Accepted]:
    """Train and write a head. Return how many drafts are right before the training and after it."""
    asked = parse(arguments)
    begun = time.monotonic()
    seconds = 60 * asked.minutes
    torch.manual_seed(asked.seed)
    torch.set_num_threads(asked.threads)
    folder = find_checkpoint(asked.model, None)
    with tempfile.TemporaryDirectory() as spare:
        asked.data = asked.data or Path(spare)
        texts = find_answers(asked, folder, Random(asked.seed), seconds * ANSWERS_SHARE)
        windows = pack(texts, asked.length)
        target = Target(folder)
        stop = time.monotonic() + seconds * STATES_SHARE
        states = find_states(asked, target, windows, asked.data / "states", stop)
        draft_ids, covered = draw_vocabulary(windows, min(asked.draft_vocab, target.config.vocab_size))
        print(f"draft vocabulary: {len(draft_ids)} tokens, {covered:.2%} of the answers' tokens", flush=True)
        head = DraftHead(LlamaConfig.from_dict(target.config.to_dict()), draft_ids)
        print(describe_pass(target, head), flush=True)
        training = HeadTraining(target, head, windows, states, max(states.num_windows // HELD_OUT, 1), asked.steps)
        training.start()
        before = training.accepted(NUM_DRAFTS)
        print(f"before the training: {before}", flush=True)
        training.train(begun + seconds - time.monotonic(), asked.max_steps, asked.rate, asked.windows)
        after = training.accepted(NUM_DRAFTS)
        print(f"after the training: {after}", flush=True)
        training.finished().save(asked.output, getattr(torch, asked.dtype))
    print(f"{asked.output} after {time.monotonic() - begun:.0f} s, {time.process_time():.0f} s of CPU time")
    return before, after


if __name__ == "__main__":
    run()
