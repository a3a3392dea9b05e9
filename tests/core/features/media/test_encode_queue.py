"""Pieces of encodes beside decoding rows take what the pacer allows, whatever each kind of stage costs."""

from __future__ import annotations

import math
import random

import pytest

from tokenloom.core.features.media.encode_queue import EncodeQueue
from tokenloom.core.features.media.encode_throttle import EncodeThrottle
from tokenloom.core.scheduling.prefill_throttle import SHARE, PrefillThrottle
from tokenloom.ipc.messages.media import Encode, MediaSpan
from tokenloom.ipc.spec.models.vision_config import Stage, VisionConfig

NUM_ROWS = 16
VISION = VisionConfig(
    family="qwen2_5_vl",
    image_token_id=1,
    hidden_size=64,
    num_layers=16,
    patch_size=2,
    merge_size=2,
    windowed_layers=tuple(i for i in range(16) if i % 4 < 3),
)
STAGES = VISION.stages
PRODUCTS = 1024 * (12 * 64**2 + 2 * 1024 * 64)  # of a layer, for an image of 256 embeddings


class Steps:
    """Steps of 1 s with decoding rows; `cost_s`: seconds per patch through a stage. Images of 256 embeddings are cut
    into `num_pieces`."""

    def __init__(self, num_pieces: int, cost_s: dict[Stage, float]) -> None:
        most = math.inf if num_pieces == 1 else PRODUCTS / num_pieces
        self.queue = EncodeQueue(4096, VISION, 2048, most)
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

    def finish(self, wanted: MediaSpan, num_decodes: int = NUM_ROWS) -> list[float]:
        """Run steps until an image is encoded; return the seconds that each spends on it."""
        taken = []
        while self.queue.cache.ready(wanted.digest) is None:
            taken.append(self.run([wanted], num_decodes)[1])
        return taken


def image(number: int, num_embeds: int) -> MediaSpan:
    grid = (1, 2 * num_embeds, 2)
    return MediaSpan(digest=bytes([number]) * 32, start=0, length=num_embeds, num_embeds=num_embeds, grid=grid)


def test_every_image_is_encoded_within_the_share_once_each_kind_of_stage_is_known() -> None:
    layer_s = 2.0 / 1024  # a layer of the images takes two steps
    steps = Steps(
        32, {"patches": layer_s / 4, "windowed layer": layer_s / 5, "layer": layer_s, "projector": layer_s / 3}
    )
    for number in range(4):
        taken = steps.finish(image(number, 256))
        assert max(taken) <= SHARE + layer_s * 32, "more than a piece above the share"
        assert sum(taken) == pytest.approx(1024 * (sum(map(steps.cost_s.__getitem__, STAGES)) - layer_s / 4 / 32))
    assert sum(taken) / len(taken) > 0.8 * SHARE, "the share is used up"


def test_one_piece_goes_with_a_step_even_if_it_takes_longer_than_the_share() -> None:
    steps = Steps(1, dict.fromkeys(STAGES, 3.0 / 400))
    runs = [steps.run([image(1, 100)]) for _ in STAGES]
    assert [[each.num_pieces for each in encodes] for encodes, _ in runs] == [[1]] * len(STAGES)
    assert steps.queue.cache.ready(image(1, 100).digest) is not None


@pytest.mark.parametrize(("num_pieces", "per_stage"), [(1, [1, 1]), (64, [3, 64]), (1 << 20, [120, 1024])])
def test_without_decoding_rows_images_are_encoded_whole(num_pieces: int, per_stage: list[int]) -> None:
    steps = Steps(num_pieces, dict.fromkeys(STAGES, 0.001))
    encodes, _ = steps.run([image(1, 30), image(2, 256)], num_decodes=0)
    assert [each.pieces_per_stage for each in encodes] == per_stage
    assert [each.num_pieces for each in encodes] == [len(STAGES) * each for each in per_stage]


def test_costs_of_steps_with_several_kinds_follow_when_the_machine_becomes_slower() -> None:
    steps = Steps(512, dict.fromkeys(STAGES, 0.0005))
    for number in range(2):
        steps.finish(image(number, 40))
    steps.cost_s = dict.fromkeys(STAGES, 0.002)
    for number in range(2, 6):
        steps.finish(image(number, 40))
    for stage in STAGES[1:]:
        assert steps.throttle.row_s(stage, 160) == pytest.approx(0.002, rel=0.1)
    assert steps.throttle.row_s("layer", 320) == steps.throttle.row_s("layer", 160)
    assert EncodeThrottle(PrefillThrottle()).row_s("layer", 1) == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_random_images_with_random_costs_are_all_encoded_in_order(seed: int) -> None:
    rng = random.Random(seed)
    cost_s = {stage: rng.choice([0.0001, 0.001, 0.01]) for stage in STAGES}
    steps = Steps(rng.choice([1, 8, 64, 1 << 20]), cost_s)
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


def test_a_piece_is_left_out_while_prompts_take_the_share_but_not_for_long() -> None:
    steps = Steps(32, dict.fromkeys(STAGES, 0.0001))
    prefills = PrefillThrottle()
    prefills.on_step(0, 1000, 10.0)
    prefills.on_step(NUM_ROWS, 0, 1.0)
    throttle = EncodeThrottle(prefills)
    planned = [steps.queue.plan([image(1, 256)], step, throttle, NUM_ROWS, 60).encodes for step in range(12)]
    assert [len(encodes) for encodes in planned] == [0, 0, 0, 1] * 3
    assert steps.queue.plan([], 13, throttle, NUM_ROWS, 0).encodes


def is_whole(encodes: list[Encode]) -> bool:
    return [each.num_pieces for each in encodes] == [each.pieces_per_stage * len(STAGES) for each in encodes]


def test_all_images_of_a_burst_are_encoded_at_once_and_later_ones_are_not() -> None:
    steps = Steps(64, dict.fromkeys(STAGES, 0.01))
    steps.queue = EncodeQueue(4096, VISION, 256, PRODUCTS / 64)  # one image a step
    for first in (1, 11):
        images = [image(first + number, 256) for number in range(8)]
        for num_decodes in (0, 0, 1, 2, 3, 4, 5, 6):  # rows decode once they have their images
            encodes, _ = steps.run(images, num_decodes)
            assert len(encodes) == 1 and is_whole(encodes)
        later = [image(first + 8, 256)]
        assert not is_whole(steps.run(later, 8)[0])
        steps.finish(later[0], 8)


def test_a_burst_is_over_once_no_image_is_wanted() -> None:
    steps = Steps(64, dict.fromkeys(STAGES, 0.01))
    encodes, _ = steps.run([image(number, 300) for number in range(3)], 0)
    assert len(encodes) == 3
    assert not steps.run([], NUM_ROWS)[0]
    assert not is_whole(steps.run([image(9, 256)], NUM_ROWS)[0])
