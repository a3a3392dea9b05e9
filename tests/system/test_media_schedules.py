"""No schedule changes an answer to a prompt with media: all equal those of transformers, family by family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tokenloom.tests.support.today import some
from tokenloom.tests.system.media_engine import (
    MAX_TOKENS,
    Checker,
    MediaRequest,
    make_requests,
    num_encodes,
    open_llm,
    run,
)
from tokenloom.tests.system.media_families import BLOCK_SIZE, FAMILIES, HEARING, WHISPER, Models, make_models

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 20": {"max_num_batched_tokens": 20, "max_num_seqs": 4},
    "chunks of 33": {"max_num_batched_tokens": 33, "max_num_seqs": 8},
    "chunks of 150": {"max_num_batched_tokens": 150, "max_num_seqs": 4},
    "preempted": {"max_num_seqs": 16, "max_num_batched_tokens": 128, "enable_prefix_caching": False},
    "small encoder cache": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "two steps in flight": {"steps_in_flight": 2, "enable_prefix_caching": False, "max_num_seqs": 6},
    "plain torch": {"enforce_reference": True},
    "deterministic": {"deterministic": True, "max_num_batched_tokens": 40},
    "two ranks": {"in_process": False, "tensor_parallel_size": 2, "max_num_batched_tokens": 64},
}
QUICK = [  # the others are slow
    ("llava", "chunks of 33"),
    ("qwen2_5_vl", "two steps in flight"),
    ("qwen3_vl", "chunks of 20"),
    ("gemma3", "preempted"),
    ("smolvlm", "small encoder cache"),
    ("qwen3_asr", "preempted"),
    ("voxtral", "chunks of 20"),
    (WHISPER, "plain"),
    (WHISPER, "chunks of 33"),
]
CASES = [
    *some(QUICK, num_today=4),
    *(
        pytest.param(name, schedule, marks=pytest.mark.nightly)
        for name in FAMILIES
        for schedule in SCHEDULES
        if (name, schedule) not in QUICK
    ),
]
NUM_REQUESTS = 12
SEED = 5


@dataclass(frozen=True)
class Family:
    """A model, its requests, and the checker of their answers."""

    models: Models
    requests: list[MediaRequest]
    checker: Checker

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request."""
        oracle = self.models.oracle
        return MAX_TOKENS + max(len(oracle.expand(each.prompt, each.media).token_ids) for each in self.requests)


@pytest.fixture(scope="module")
def families() -> dict[str, Family]:
    """Return the families that the tests have made so far, by name."""
    return {}


def family_of(name: str, families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory) -> Family:
    if name not in families:
        models = make_models(tmp_path_factory.mktemp(name), name)
        families[name] = Family(models, make_requests(models, SEED, NUM_REQUESTS), Checker(models))
    return families[name]


def options_of(schedule: str, family: Family) -> dict[str, object]:
    """Return the schedule's options with those that depend on the lengths of the requests."""
    options = dict(SCHEDULES[schedule])
    if schedule == "preempted":
        longest = -(-family.longest // BLOCK_SIZE) * BLOCK_SIZE
        num_tokens = longest - family.models.num_clip_tokens
        options |= {"max_model_len": num_tokens, "num_kv_blocks": longest // BLOCK_SIZE + 2}
    if schedule == "small encoder cache":
        options["encoder_cache_tokens"] = family.models.max_embeds
    return options


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_no_schedule_changes_an_answer_to_media(
    name: str, schedule: str, families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = family_of(name, families, tmp_path_factory)
    models, num_media = family.models, len(family.models.sizes)
    turns, num_encoded = [family.requests], num_media
    if schedule.startswith("chunks"):  # whichever requests run together, there is a prefix the second time
        turns = [family.requests] * 2
    if schedule == "small encoder cache":  # other media between two turns of these, of which some have to go
        turns = [family.requests, make_requests(models, SEED + 1, 6), family.requests]
        num_encoded = 2 * num_media + 1
    with open_llm(models, **options_of(schedule, family)) as llm:
        outputs = [output for turn in turns for output in run(llm, models, turn)]
        count = num_encodes(llm, num_encoded)
    family.checker.check([request for turn in turns for request in turn], outputs)
    if schedule == "preempted":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if schedule.startswith("chunks"):
        assert any(output.num_cached_tokens for output in outputs)
        assert (
            sum(len(output.prompt_token_ids or ()) for output in outputs)
            > SCHEDULES[schedule]["max_num_batched_tokens"]
        )
    assert count == num_encoded if schedule == "plain" else count >= num_encoded


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HEARING)
def test_no_size_of_chunks_changes_an_answer_to_clips(
    name: str, families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Chunks of each size up to one that holds a whole clip, which begin and end at any place in clips."""
    family = family_of(name, families, tmp_path_factory)
    requests, longest = family.requests[:5], max(family.models.max_embeds, family.models.num_clip_tokens)
    for size in range(1, longest + 2):
        with open_llm(family.models, max_num_batched_tokens=size, max_num_seqs=min(size, 3)) as llm:
            outputs = run(llm, family.models, requests)
            assert num_encodes(llm, 1) > 0
        family.checker.check(requests, outputs)
