"""No schedule changes an answer to a prompt with images: all equal those of transformers, family by family."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from PIL import Image

from tokenloom import RequestOutput
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.system.image_engine import (
    BLOCK_SIZE,
    MAX_TOKENS,
    SIZES,
    Checker,
    ImageRequest,
    Models,
    images,
    make_models,
    make_requests,
    max_embeds,
    num_encodes,
    open_llm,
    run,
)

SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunks of 20": {"max_num_batched_tokens": 20, "max_num_seqs": 4},
    "chunks of 33": {"max_num_batched_tokens": 33, "max_num_seqs": 8},
    "chunks of 150": {"max_num_batched_tokens": 150},
    "preempted": {"max_num_seqs": 16, "max_num_batched_tokens": 128, "enable_prefix_caching": False},
    "small encoder cache": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "two steps in flight": {"steps_in_flight": 2, "enable_prefix_caching": False, "max_num_seqs": 6},
    "plain torch": {"enforce_reference": True},
    "two ranks": {"in_process": False, "tensor_parallel_size": 2, "max_num_batched_tokens": 64},
}
DEFAULT = {  # the others are slow
    ("llava", "chunks of 33"),
    ("qwen2_5_vl", "two steps in flight"),
    ("qwen3_vl", "chunks of 20"),
    ("gemma3", "preempted"),
    ("smolvlm", "small encoder cache"),
}
CASES = [
    pytest.param(name, schedule, marks=() if (name, schedule) in DEFAULT else pytest.mark.slow)
    for name in VISION_MODELS
    for schedule in SCHEDULES
]
NUM_REQUESTS = 12
SEED = 5


@dataclass(frozen=True)
class Family:
    """A model, its requests, and the checker of their answers."""

    models: Models
    requests: list[ImageRequest]
    checker: Checker

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request."""
        oracle = self.models.oracle
        return MAX_TOKENS + max(len(oracle.expand(each.prompt, each.images).token_ids) for each in self.requests)


@pytest.fixture(scope="module")
def families() -> dict[str, Family]:
    """Return the families that the tests have made so far, by name."""
    return {}


def family_of(name: str, families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory) -> Family:
    if name not in families:
        models = make_models(tmp_path_factory.mktemp(name), name)
        families[name] = Family(models, make_requests(models.marker, SEED, NUM_REQUESTS), Checker(models))
    return families[name]


def options_of(schedule: str, family: Family) -> dict[str, object]:
    """Return the schedule's options with those that depend on the lengths of the requests."""
    options = dict(SCHEDULES[schedule])
    if schedule == "preempted":
        longest = -(-family.longest // BLOCK_SIZE) * BLOCK_SIZE
        options |= {"max_model_len": longest, "num_kv_blocks": longest // BLOCK_SIZE + 2}
    if schedule == "small encoder cache":
        options["encoder_cache_tokens"] = max_embeds(family.models)
    return options


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_no_schedule_changes_an_answer_to_images(
    name: str, schedule: str, families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = family_of(name, families, tmp_path_factory)
    turns, num_encoded = [family.requests], len(SIZES)
    if schedule == "small encoder cache":  # other images between two turns of these, of which some have to go
        turns = [family.requests, make_requests(family.models.marker, SEED + 1, 6), family.requests]
        num_encoded = 2 * len(SIZES) + 1
    with open_llm(family.models, **options_of(schedule, family)) as llm:
        outputs = [output for turn in turns for output in run(llm, turn)]
        count = num_encodes(llm, num_encoded)
    family.checker.check([request for turn in turns for request in turn], outputs)
    if schedule == "preempted":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert count == num_encoded if schedule == "plain" else count >= num_encoded


def cuts_image(family: Family, stem: str, image: Image.Image) -> bool:
    """Return whether the last whole block of a prompt that ends with an image ends inside the image."""
    oracle, prompt = family.models.oracle, f"{stem} {family.models.marker}"
    start, end = oracle.span(prompt, [image])
    return start < len(oracle.expand(prompt, [image]).token_ids) // BLOCK_SIZE * BLOCK_SIZE < end


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "qwen2_vl" else pytest.mark.slow) for each in VISION_MODELS]
)
def test_a_cached_prefix_may_end_inside_an_image_or_after_it(
    name: str, families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same image behind the same text is not computed again up to the last whole block; another image behind the
    same text is."""
    family = family_of(name, families, tmp_path_factory)
    marker = family.models.marker
    first, other, *_ = images(SEED + 1)
    stem = next(each for each in ("A" + " a" * count for count in range(BLOCK_SIZE)) if cuts_image(family, each, first))
    requests = [
        ImageRequest(f"{stem} {marker}", [first]),
        ImageRequest(f"{stem} {marker} and so on, and on and on and on, and on. What is this?", [first]),
        ImageRequest(f"{stem} {marker} and so on, and on and on and on, and on. Where is it?", [first]),
        ImageRequest(f"{stem} {marker} and so on, and on and on and on, and on. Where is it?", [other]),
    ]
    outputs: list[RequestOutput] = []
    counts: list[int] = []
    with open_llm(family.models) as llm:
        for request in requests:
            outputs += run(llm, [request])
            counts.append(num_encodes(llm, at_least=1 + (request is requests[3])))
    family.checker.check(requests, outputs)
    start, end = family.models.oracle.span(requests[1].prompt, requests[1].images)
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] == 0
    assert start < cached[1] < end, "the last whole block of the first prompt ends inside the image"
    assert cached[2] > end, "the third prompt parts from the second after the image"
    assert cached[3] <= start, "another image has no cached block"
    assert counts[2] == counts[1], "an image whose span is cached is not encoded again"
    assert counts[3] == counts[2] + 1
