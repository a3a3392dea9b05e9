"""The engines of the tests of images: tiny random models of every family, prompts with images among prompts of text.

The prompts of `make_requests` have up to four images of several sizes. Some begin alike and part inside an image or
after one, some repeat an image at other places, and some have none.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.frontend.client.client import Client
from tokenloom.frontend.media.images.image_processor_config import load_image_processor
from tokenloom.ipc.messages.metrics import Counter
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.support.vision_oracle import VisionOracle, random_image

BLOCK_SIZE = 8
MAX_TOKENS = 12
REPORT_S = 5.0  # until a finished encode is counted
SIZES = ((60, 80), (100, 40), (33, 33), (200, 150))  # of the images, width and height
OPTIONS: dict[str, object] = {
    "num_threads": 1,
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 1024,
    "block_size": BLOCK_SIZE,
}
WORDS = ("the", "capital", "of", "France", "Japan", "is", "a", "city", "and", "12", "+", "7", "What", "see", "you")


@dataclass(frozen=True)
class Models:
    """A checkpoint, the text of an image in its prompts, and the oracle."""

    checkpoint: Path
    marker: str
    oracle: VisionOracle


def make_models(folder: Path, name: str, **text_fields: Any) -> Models:
    """Write the checkpoint of a model of VISION_MODELS."""
    checkpoint = vision_checkpoint(folder, name, **text_fields)
    return Models(checkpoint, VISION_MODELS[name].image, VisionOracle(checkpoint))


def open_llm(models: Models, **options: object) -> LLM:
    """Start an engine in this process, unless the options say otherwise."""
    return LLM(models.checkpoint, **({"in_process": True} | OPTIONS | options))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ImageRequest:
    """A prompt with as many markers as images."""

    prompt: str
    images: Sequence[Image.Image]

    @property
    def form(self) -> Any:
        """The prompt as `generate` takes it."""
        return {"prompt": self.prompt, "multi_modal_data": {"image": list(self.images)}} if self.images else self.prompt


def images(seed: int) -> list[Image.Image]:
    """Return one image of each size."""
    return [random_image(seed * 100 + index, *size) for index, size in enumerate(SIZES)]


def make_requests(marker: str, seed: int, count: int) -> list[ImageRequest]:
    """Return requests in turns: one image after text that many begin with, an image at the very start, text alone, two
    images, the first images again with another question, three or four images."""
    rng = random.Random(seed)
    pool = images(seed)

    def words(number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))

    stem = words(9)
    requests = []
    for index in range(count):
        one, two, *_ = rng.sample(pool, 4)
        forms = (
            ImageRequest(f"{stem} {marker}\n{words(4)}", [pool[index // 6 % 2]]),
            ImageRequest(f"{marker} {words(rng.randrange(1, 30))}", [one]),
            ImageRequest(words(rng.randrange(3, 60)), []),
            ImageRequest(f"{stem} {marker} {words(2)} {marker}{words(5)}?", [pool[0], two]),
            ImageRequest(f"{stem} {marker}\n{words(7)}", [pool[0]]),
            ImageRequest(f"{words(3)} {marker}{marker} {words(3)} {marker}{words(index % 5)}", [one, two, one]),
        )
        requests.append(forms[index % len(forms)])
    four = "".join(f"{marker} {word} " for word in rng.choices(WORDS, k=4))
    return [*requests, ImageRequest(f"{four}?", pool)]


def run(client: Client, requests: Sequence[ImageRequest], max_tokens: int = MAX_TOKENS) -> list[RequestOutput]:
    """Run all requests at once."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return client.generate([each.form for each in requests], params, use_tqdm=False)


class Checker:
    """Checks answers with the oracle, each answer to a prompt once: most schedules give the same ones."""

    def __init__(self, models: Models) -> None:
        self._oracle = models.oracle
        self._checked: set[tuple[object, ...]] = set()

    def check(
        self, requests: Sequence[ImageRequest], outputs: Sequence[RequestOutput], max_tokens: int = MAX_TOKENS
    ) -> None:
        assert len(outputs) == len(requests)
        for request, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0].token_ids
            assert output.finished and len(answer) == max_tokens, (len(answer), output.outputs[0].finish_reason)
            key = (request.prompt, *(each.tobytes() for each in request.images), tuple(answer))
            if key not in self._checked:
                expanded = self._oracle.expand(request.prompt, request.images).token_ids
                assert output.prompt_token_ids == expanded
                self._oracle.check(request.prompt, request.images, answer)
                self._checked.add(key)


def counter(client: Client, name: str) -> int:
    """Return the value of a counter of the engine."""
    (found,) = (each for each in client.get_metrics() if each.name == f"tokenloom_{name}")
    assert isinstance(found, Counter)
    return found.value


def num_encodes(client: Client, at_least: int = 0) -> int:
    """Return how many images the engine has encoded since its core started; wait for the report of `at_least`."""
    deadline = time.monotonic() + REPORT_S
    while (count := counter(client, "encoder_encodes_total")) < at_least and time.monotonic() < deadline:
        time.sleep(0.02)
    return count


def max_embeds(models: Models) -> int:
    """Return the embeddings of the largest image that the model can be shown."""
    vision = load_model_config(models.checkpoint).vision
    assert vision is not None
    return load_image_processor(models.checkpoint, vision).max_embeds
