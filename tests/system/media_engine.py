"""The engines of the tests of media: prompts with images or clips of audio among prompts of text.

The prompts of `make_requests` have up to four media of several sizes. Some begin alike and part inside a medium or
after one, some repeat a medium at other places, and some have none. Whisper's have one clip each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.frontend.client.client import Client
from tokenloom.ipc.messages.metrics import Counter
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.media_families import BLOCK_SIZE, Models

MAX_TOKENS = 12
REPORT_S = 5.0  # until a finished encode is counted
OPTIONS: dict[str, object] = {
    "num_threads": 1,
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 1024,
    "block_size": BLOCK_SIZE,
}
WORDS = ("the", "capital", "of", "France", "Japan", "is", "a", "city", "and", "12", "+", "7", "What", "see", "you")


def open_llm(models: Models, **options: object) -> LLM:
    """Start an engine in this process, unless the options say otherwise."""
    return LLM(models.checkpoint, **({"in_process": True} | OPTIONS | models.options | options))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MediaRequest:
    """A prompt with its media."""

    prompt: str
    media: Sequence[Any]

    def form(self, models: Models) -> Any:
        """Return the prompt as `generate` takes it."""
        given = [models.given(each) for each in self.media]
        return {"prompt": self.prompt, "multi_modal_data": {models.kind: given}} if given else self.prompt


def make_requests(models: Models, seed: int, count: int) -> list[MediaRequest]:
    """Return requests in turns: one medium after text that many begin with, a medium at the very start, text alone, two
    media, the first media again with another question, three or four media."""
    if not models.marker:
        return _make_transcriptions(models, seed, count)
    rng, marker = random.Random(seed), models.marker
    pool = models.pool(seed)

    def words(number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))

    stem = words(9)
    requests = []
    for index in range(count):
        one, two, *_ = rng.sample(pool, 4)
        forms = (
            MediaRequest(f"{stem} {marker}\n{words(4)}", [pool[index // 6 % 2]]),
            MediaRequest(f"{marker} {words(rng.randrange(1, 30))}", [one]),
            MediaRequest(words(rng.randrange(3, 60)), []),
            MediaRequest(f"{stem} {marker} {words(2)} {marker}{words(5)}?", [pool[0], two]),
            MediaRequest(f"{stem} {marker}\n{words(7)}", [pool[0]]),
            MediaRequest(f"{words(3)} {marker}{marker} {words(3)} {marker}{words(index % 5)}", [one, two, one]),
        )
        requests.append(forms[index % len(forms)])
    four = "".join(f"{marker} {word} " for word in rng.choices(WORDS, k=4))
    return [*requests, MediaRequest(f"{four}?", pool)]


def _make_transcriptions(models: Models, seed: int, count: int) -> list[MediaRequest]:
    """Return requests for the transcripts of a pool of clips, with timestamps and without, some behind other text."""
    rng, pool, requests = random.Random(seed), models.pool(seed), []
    for index in range(count):
        before = f"<|startofprev|> {' '.join(rng.choices(WORDS, k=rng.randrange(1, 20)))}" if index % 3 == 0 else ""
        prompt = f"{before}<|startoftranscript|><|{rng.choice(('en', 'de'))}|><|transcribe|>"
        prompt += "<|notimestamps|>" * (index % 2)
        requests.append(MediaRequest(prompt, [pool[index % len(pool)]]))
    return requests


def run(
    client: Client, models: Models, requests: Sequence[MediaRequest], max_tokens: int = MAX_TOKENS
) -> list[RequestOutput]:
    """Run all requests at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return client.generate([each.form(models) for each in requests], params, use_tqdm=False)


class Checker:
    """Checks answers with the oracle, each answer to a prompt once: most schedules give the same ones."""

    def __init__(self, models: Models) -> None:
        self._oracle = models.oracle
        self._checked: set[tuple[object, ...]] = set()

    def check(
        self, requests: Sequence[MediaRequest], outputs: Sequence[RequestOutput], max_tokens: int = MAX_TOKENS
    ) -> None:
        assert len(outputs) == len(requests)
        for request, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0].token_ids
            assert output.finished and len(answer) == max_tokens, (len(answer), output.outputs[0].finish_reason)
            key = (request.prompt, *(each.tobytes() for each in request.media), tuple(answer))
            if key not in self._checked:
                expanded = self._oracle.expand(request.prompt, request.media).token_ids
                assert output.prompt_token_ids == expanded
                self._oracle.check(request.prompt, request.media, answer)
                self._checked.add(key)


def counter(client: Client, name: str) -> int:
    """Return the value of a counter of the engine."""
    (found,) = (each for each in client.get_metrics() if each.name == f"tokenloom_{name}")
    assert isinstance(found, Counter)
    return found.value


def num_encodes(client: Client, at_least: int = 0) -> int:
    """Return how many media the engine has encoded since its core started; wait for the report of `at_least`."""
    counts = list[int]()

    def is_reported() -> bool:
        counts.append(counter(client, "encoder_encodes_total"))
        return counts[-1] >= at_least

    wait_until(is_reported, f"{at_least} encodes", REPORT_S)
    return counts[-1]
