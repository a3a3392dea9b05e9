"""The requests of the harnesses, and the comparison of two answers to the same request."""

from __future__ import annotations

import io
import random
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenloom import Client, LoRARequest, RequestOutput, SamplingParams
from tokenloom.frontend.client.outputs import CompletionOutput
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_LOGPROB_DIFFERENCE = 1e-4
ANSWER_S = 60.0
PLACES = ("France", "Japan", "Italy", "Spain", "Kenya", "Peru", "India", "Canada", "Norway", "Egypt", "Cuba", "Chad")
CITY = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 60}}, "required": ["capital"]}
STATISTICS = {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 40}


@dataclass(frozen=True)
class Work:
    kind: str
    prompt: str
    params: SamplingParams
    adapter: str = ""  # name; empty: the base model
    images: tuple[Image, ...] = ()

    @property
    def form(self) -> Any:
        """The prompt and its images as `generate` takes them: each time in other bytes, so that they are read again."""
        files = [_png(image) for image in self.images]
        return {"prompt": self.prompt, "multi_modal_data": {"image": files}} if files else self.prompt

    @property
    def lora_request(self) -> LoRARequest | None:
        return LoRARequest(self.adapter) if self.adapter else None


def _png(image: Image) -> bytes:
    """Return a file of the image with a comment of its own."""
    from PIL.PngImagePlugin import PngInfo

    comment, file = PngInfo(), io.BytesIO()
    comment.add_text("Comment", secrets.token_hex(8))
    image.save(file, "PNG", pnginfo=comment)
    return file.getvalue()


def make_work(rng: random.Random, num_sentences: int = 0) -> list[Work]:
    """Return greedy, seeded and stopped requests, with logprobs, with several answers, and with grammars. Each prompt
    begins with `num_sentences` of its own."""
    forms: dict[str, dict[str, object]] = {
        "greedy": {"temperature": 0},
        "greedy, to its end": {"temperature": 0, "ignore_eos": False},
        "seeded": {"temperature": 0.8, "top_p": 0.95},
        "stop strings": {"top_k": 50, "stop": ["the", "."]},
        "logprobs": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
        "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}, "min_tokens": 30},
        "four answers": {"n": 4, "temperature": 1.0},
        "three answers, logprobs": {"n": 3, "temperature": 0.9, "logprobs": 1},
        "a schema": {"structured_outputs": StructuredOutputsParams(json=CITY), "ignore_eos": False},
        "a long schema": {"structured_outputs": StructuredOutputsParams(json=STATISTICS), "temperature": 0},
        "a regex": {"structured_outputs": StructuredOutputsParams(regex="([a-z]{2,9} ){30}"), "logprobs": 0},
        "a choice": {"structured_outputs": StructuredOutputsParams(choice=list(PLACES)), "n": 2},
    }
    work = []
    for i, (kind, form) in enumerate(forms.items()):
        fields = {"seed": i, "max_tokens": rng.randrange(40, 160), "ignore_eos": True} | form
        place = PLACES[i % len(PLACES)]
        others = random.Random(place).choices(PLACES, k=num_sentences)
        beginning = "".join(f"The way from {place} to {other}. " for other in others)
        prompt = f"{beginning}{'All the cities of the world. ' * rng.randrange(6)}The capital of {place} is"
        work.append(Work(kind, prompt, SamplingParams(**fields)))  # type: ignore[arg-type]
    return work


def with_adapters(work: Sequence[Work], adapters: Sequence[str], rng: random.Random) -> list[Work]:
    """Return the work, with the base model and again with random adapters: each of these with a greedy request, and
    about four times in all."""
    greedy = [replace(each, adapter=name) for each in work if each.kind == "greedy" for name in adapters]
    others = [replace(rng.choice(work), adapter=name) for name in adapters for _ in range(3)]
    return [*work, *greedy, *others]


def with_images(work: Sequence[Work], marker: str, images: Sequence[Image], rng: random.Random) -> list[Work]:
    """Return the work, and again each with one to three of the images; `marker` is the text of an image."""
    chosen = [tuple(rng.sample(images, rng.randint(1, 3))) for _ in work]
    return [
        *work,
        *(
            replace(each, prompt=f"{marker * len(some)} {each.prompt}", images=some)
            for each, some in zip(work, chosen, strict=True)
        ),
    ]


def without_effect(work: Sequence[Work], calm: Sequence[RequestOutput]) -> list[str]:
    """Return the adapters with which a greedy request has the base model's tokens: a test with them could not fail."""
    tokens = {
        each.adapter: found.outputs[0].token_ids
        for each, found in zip(work, calm, strict=True)
        if each.kind == "greedy"
    }
    return [name for name, found in tokens.items() if name and found == tokens[""]]


def submit(client: Client, work: Sequence[Work]) -> list[Future[RequestOutput]]:
    return [client.submit(each.form, each.params, lora_request=each.lora_request) for each in work]


def answers(client: Client, work: Sequence[Work]) -> list[RequestOutput]:
    return [future.result(timeout=ANSWER_S) for future in submit(client, work)]


def check_equal(calm: Sequence[RequestOutput], found: Sequence[RequestOutput | Future[RequestOutput]]) -> None:
    """Check that answers, which are waited for, equal those of a calm engine."""
    outputs = [each.result(timeout=ANSWER_S) if isinstance(each, Future) else each for each in found]
    faults = [(place, difference(*pair)) for place, pair in enumerate(zip(calm, outputs, strict=True))]
    assert not [fault for fault in faults if fault[1]]


def difference(calm: RequestOutput, harmed: RequestOutput) -> str | None:
    """Describe the first difference of two answers; None if they are equal."""
    if calm.prompt_token_ids != harmed.prompt_token_ids or len(calm.outputs) != len(harmed.outputs):
        return "another prompt or number of answers"
    for one, other in zip(calm.outputs, harmed.outputs, strict=True):
        found = _answer_difference(one, other)
        if found is not None:
            return f"answer {one.index}: {found}"
    return _logprob_difference(calm.prompt_logprobs, harmed.prompt_logprobs)


def _answer_difference(calm: CompletionOutput, harmed: CompletionOutput) -> str | None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        if getattr(calm, name) != getattr(harmed, name):
            return f"{name} {getattr(harmed, name)!r}, calm {getattr(calm, name)!r}"
    return _logprob_difference(calm.logprobs, harmed.logprobs)


def _logprob_difference(calm: object, harmed: object) -> str | None:
    """Compare None or lists of one dict a token (token id to Logprob); near ties may reorder the likeliest tokens."""
    one, other = _numbers(calm), _numbers(harmed)
    if len(one) != len(other):
        return f"logprobs of {len(other)} tokens, calm of {len(one)}"
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if len(a) != len(b) or any(abs(x - y) > MAX_LOGPROB_DIFFERENCE for x, y in zip(a, b, strict=True)):
            return f"logprobs at {place}: {b}, calm {a}"
    return None


def _numbers(logprobs: object) -> list[list[float]]:
    """Return the sorted logprobs of each token; none of one without logprobs, as the first of a prompt."""
    tokens = logprobs if isinstance(logprobs, list) else []
    return [sorted(each.logprob for each in (token or {}).values()) for token in tokens]
