"""Pieces of encodes beside decoding rows take what the pacer allows, whatever each kind of stage costs."""

from __future__ import annotations

import math
import random

import pytest

from tokenloom.core.scheduling.encode_queue import EncodeQueue
from tokenloom.core.scheduling.encode_throttle import EncodeThrottle
from tokenloom.core.scheduling.prefill_throttle import SHARE, PrefillThrottle
from tokenloom.ipc.config.vision_config import Stage
from tokenloom.ipc.messages.media import Encode, MediaSpan

NUM_ROWS = 16
STAGES: tuple[Stage, ...] = ("patches", *(["windowed layer"] * 3 + ["layer"]) * 4, "projector")  # type: ignore[assignment]


class Steps:
    """Steps of 1 s with decoding rows; `cost_s`: seconds per patch through a stage."""

    def __init__(self, piece_patches: int | None, cost_s: dict[Stage, float]) -> None:
        self.queue = EncodeQueue(4096, STAGES, 4, 2048, piece_patches)
        prefills = PrefillThrottle()
        prefills.on_step(NUM_ROWS, 0, 1.0)
        self.throttle, self.cost_s, self.number = EncodeThrottle(prefills), cost_s, 0

    def run(self, wanted: list[MediaSpan], num_decodes: int = NUM_ROWS) -> tuple[list[Encode], float]:
        """Run a step; return its encodes and the seconds that they take."""
        self.number += 1
        missing = [span for span in wanted if self.queue.cache.ready(span.digest) is None]
        encodes = self.queue.plan(missing, self.number, self.throttle, num_decodes, 0).encodes
        parts = self.queue.work_of(encodes)
        seconds = sum(part.work * self.cost_s[part.stage] for part in parts)
        self.throttle.on_step(num_decodes, 0, parts, (num_decodes > 0) * 1.0 + seconds)
        self.queue.on_encoded(self.number, encodes, [])
        self.queue.cache.check_invariants()
        return encodes, seconds


def image(number: int, num_embeds: int) -> MediaSpan:
    grid = (1, 2 * num_embeds, 2)
    return MediaSpan(digest=bytes([number]) * 32, start=0, length=num_embeds, num_embeds=num_embeds, grid=grid)


def test_every_image_is_encoded_within_the_share_once_each_kind_of_stage_is_known() -> None:
    layer_s = 2.0 / 1024  # a layer of the images takes two steps
    steps = Steps(
        32, {"patches": layer_s / 4, "windowed layer": layer_s / 5, "layer": layer_s, "projector": layer_s / 3}
    )
    for number in range(4):
        taken = []
        while steps.queue.cache.ready(image(number, 256).digest) is None:
            taken.append(steps.run([image(number, 256)])[1])
        assert max(taken) <= SHARE + layer_s * 32, "more than a piece above the share"
        assert sum(taken) == pytest.approx(1024 * (sum(map(steps.cost_s.__getitem__, STAGES)) - layer_s / 4 / 32))
    assert sum(taken) / len(taken) > 0.8 * SHARE, "the share is used up"


def test_one_piece_goes_with_a_step_even_if_it_takes_longer_than_the_share() -> None:
    steps = Steps(None, dict.fromkeys(STAGES, 3.0 / 400))
    runs = [steps.run([image(1, 100)]) for _ in STAGES]
    assert [[each.num_pieces for each in encodes] for encodes, _ in runs] == [[1]] * len(STAGES)
    assert steps.queue.cache.ready(image(1, 100).digest) is not None


@pytest.mark.parametrize("piece_patches", [None, 16])
def test_without_decoding_rows_images_are_encoded_whole(piece_patches: int | None) -> None:
    steps = Steps(piece_patches, dict.fromkeys(STAGES, 0.001))
    encodes, _ = steps.run([image(1, 30), image(2, 50)], num_decodes=0)
    per_stage = [1, 1] if piece_patches is None else [8, 13]
    assert [each.pieces_per_stage for each in encodes] == per_stage
    assert [each.num_pieces for each in encodes] == [len(STAGES) * each for each in per_stage]


def test_costs_of_steps_with_several_kinds_follow_when_the_machine_becomes_slower() -> None:
    steps = Steps(8, dict.fromkeys(STAGES, 0.0005))
    for number in range(2):
        while steps.queue.cache.ready(image(number, 40).digest) is None:
            steps.run([image(number, 40)])
    steps.cost_s = dict.fromkeys(STAGES, 0.002)
    for number in range(2, 6):
        while steps.queue.cache.ready(image(number, 40).digest) is None:
            steps.run([image(number, 40)])
    for stage in STAGES[1:]:
        assert steps.throttle.patch_s(stage, 160) == pytest.approx(0.002, rel=0.1)
    assert steps.throttle.patch_s("layer", 320) == steps.throttle.patch_s("layer", 160)
    assert EncodeThrottle(PrefillThrottle()).patch_s("layer", 1) == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_random_images_with_random_costs_are_all_encoded_in_order(seed: int) -> None:
    rng = random.Random(seed)
    cost_s = {stage: rng.choice([0.0001, 0.001, 0.01]) for stage in STAGES}
    steps = Steps(rng.choice([None, 1, 16, 128]), cost_s)
    images = [image(number, rng.choice([1, 7, 64, 300])) for number in range(8)]
    expected: dict[bytes, int] = {}
    for _ in range(20_000):
        encodes, _ = steps.run(images, rng.choice([0, 1, NUM_ROWS]))
        for each in encodes:
            assert each.first_piece == expected.get(each.digest, 0) and each.num_pieces >= 1
            expected[each.digest] = each.first_piece + each.num_pieces
        if not encodes:
            break
    assert all(steps.queue.cache.ready(each.digest) for each in images)
