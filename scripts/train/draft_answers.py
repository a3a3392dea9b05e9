"""A model's own answers as texts for the training of its draft head, by the engine.

Half of the answers are greedy, the others are drawn at a temperature between TEMPERATURES.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import msgspec

from tokenloom import Client, SamplingParams
from tokenloom.scripts.train.draft_prompts import Prompt
from tokenloom.scripts.train.draft_windows import Text

TEMPERATURES = (0.7, 1.0)
MAX_PROMPT = 250  # tokens; longer prompts are left out
AT_ONCE = 64  # prompts of a round


def answers(
    llm: Client, prompts: Iterator[Prompt], seconds: float, max_tokens: int, rng: Random, max_num_texts: int
) -> Iterator[list[Text]]:
    """Yield rounds of texts until the seconds are over, or there are enough texts. At least one round is yielded."""
    stop, num_texts = time.monotonic() + seconds, 0
    while num_texts < max_num_texts and (num_texts == 0 or time.monotonic() < stop):
        ids = [llm.tokenize(prompt) for prompt in islice(prompts, min(AT_ONCE, max_num_texts - num_texts))]
        ids = [each for each in ids if 0 < len(each) <= MAX_PROMPT]
        params = [
            SamplingParams(
                temperature=rng.choice([0.0, rng.uniform(*TEMPERATURES)]),
                seed=rng.getrandbits(31),
                max_tokens=max_tokens,
            )
            for _ in ids
        ]
        outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
        texts = [
            Text(prompt, list(output.outputs[0].token_ids), each.temperature == 0.0)
            for prompt, output, each in zip(ids, outputs, params, strict=True)
        ]
        num_texts += len(texts)
        yield texts


def save(path: Path, texts: list[Text]) -> None:
    path.write_bytes(msgspec.json.encode(texts))


def load(path: Path) -> list[Text]:
    return msgspec.json.decode(path.read_bytes(), type=list[Text])
