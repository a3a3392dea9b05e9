"""Images are encoded once, beside decoding rows within the pacer's share, and a bad one ends its own requests alone."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from tokenloom.core.scheduling.prefill_throttle import SHARE
from tokenloom.ipc.messages.media import EncoderProgress
from tokenloom.tests.core.fake_media import image_digest, new_vision, with_images
from tokenloom.tests.core.harness import Harness, prompt_of

TEXT = prompt_of(random.Random(0), 40)


def new_harness(
    *, num_layers: int = 6, is_bidirectional: bool = False, capacity: int = 64, **options: object
) -> Harness:
    sizes = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
    vision = new_vision(num_layers, is_bidirectional=is_bidirectional)
    return Harness(vision=vision, encoder_cache=capacity, max_item_embeds=20, **sizes)  # type: ignore[arg-type]


def add(harness: Harness, key: int, *parts: list[int] | tuple[int, int], max_tokens: int = 4, **params: object) -> None:
    prompt, media = with_images(parts)
    harness.add(key, prompt, max_tokens, media=media, **params)  # type: ignore[arg-type]


def progress_of(harness: Harness) -> EncoderProgress:
    return msgspec.structs.replace(harness.core.media.encodes.progress())


@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_requests_with_one_image_encode_it_once(is_bidirectional: bool) -> None:
    harness = new_harness(is_bidirectional=is_bidirectional)
    for key in range(5):
        add(harness, key, TEXT[: 3 + key], (1, 9), TEXT[:3])
    harness.run_to_the_end()
    add(harness, 7, TEXT[:20], (1, 9), TEXT[:3])
    add(harness, 8, TEXT[:3], (1, 9), [5, 6, 7])  # finds the prefix of the first
    harness.run_to_the_end()
    assert harness.worker.encoder.num_begun == {image_digest(1): 1}
    assert harness.cached[8] == 12
    assert progress_of(harness) == EncoderProgress(
        capacity=64, num_entries=1, num_used_embeds=9, num_encodes=1, num_hits=5, num_cached=1
    )


def test_a_hit_may_end_inside_an_image_and_other_images_are_never_hits() -> None:
    harness = new_harness()
    add(harness, 1, TEXT[:2], (1, 11), TEXT[:1])
    harness.run_to_the_end()
    add(harness, 2, TEXT[:2], (1, 11), [7])
    add(harness, 3, TEXT[:2], (2, 11), TEXT[:1])
    harness.run_to_the_end()
    assert (harness.cached[2], harness.cached[3]) == (12, 0)
    assert harness.worker.encoder.num_begun == {image_digest(1): 1, image_digest(2): 1}


def test_an_image_larger_than_the_step_before_it_is_computed_in_chunks_unless_it_is_bidirectional() -> None:
    for is_bidirectional in (False, True):
        harness = new_harness(is_bidirectional=is_bidirectional, max_num_seqs=2, max_num_batched_tokens=8)
        assert harness.spec.max_num_batched_tokens == (22 if is_bidirectional else 8)
        add(harness, 1, TEXT[:5], (1, 19), (2, 13), TEXT[:3])
        harness.run_to_the_end()


def test_a_missing_file_ends_the_requests_that_need_it_and_no_others() -> None:
    harness = new_harness()
    harness.broken.add(image_digest(1))
    for key in range(3):
        add(harness, key, TEXT[: 3 + key], (1 + key // 2, 9), TEXT[:3])
    add(harness, 5, TEXT[:5])
    harness.run_to_the_end()
    assert [harness.finished[key].reason for key in (0, 1, 2, 5)] == ["error", "error", "length", "length"]
    assert harness.error_of(0) == (
        "request: an image of the prompt could not be read: the file is missing: send it again"
    )
    assert progress_of(harness).num_failed == 1
    harness.broken.clear()
    add(harness, 6, TEXT[:3], (1, 9), TEXT[:3])
    harness.run()
    harness.check(6)


def test_an_abort_leaves_the_entry_to_others_and_an_encode_under_way_is_completed() -> None:
    harness = new_harness(steps_in_flight=1)
    harness.worker.step_s, harness.worker.encode_s = 1.0, 0.05
    add(harness, 1, TEXT[:3], max_tokens=60)
    harness.turns(3)
    add(harness, 2, TEXT[:3], (1, 9), TEXT[:3])
    harness.turns(2)
    encodes = harness.core.media.encodes
    assert encodes.partial is not None
    harness.abort(2)
    harness.run_to_the_end()
    assert encodes.partial is None and encodes.cache.ready(image_digest(1)) is not None
    add(harness, 3, TEXT[:3], (1, 9), TEXT[:3])
    harness.run_to_the_end()
    assert harness.worker.encoder.num_begun == {image_digest(1): 1}


def test_a_row_that_was_freed_before_the_workers_were_told_of_it_is_admitted_once() -> None:
    harness = new_harness()
    add(harness, 1, (1, 9), TEXT[:3])
    harness.core.step()
    add(harness, 2, (1, 9), TEXT[:4])
    harness.core.step()  # its image is in the step before, so that there is nothing to send
    assert len(harness.worker.queue) == 1 and harness.core.scheduler.rows.num_active == 2
    harness.abort(2)
    add(harness, 3, (1, 9), TEXT[:5])
    harness.run_to_the_end()
    assert [harness.finished[key].reason for key in (1, 3)] == ["length", "length"]


def test_more_images_than_fit_are_encoded_in_turn_and_none_twice() -> None:
    harness = new_harness(capacity=20)
    for key in range(6):
        add(harness, key, TEXT[:key], (2 * key, 9), TEXT[:3], (2 * key + 1, 11), TEXT[:1])
    harness.run_to_the_end()
    assert set(harness.worker.encoder.num_begun.values()) == {1} and len(harness.worker.encoder.num_begun) == 12


def test_a_text_model_refuses_images_and_an_image_above_the_cache_is_named() -> None:
    harness = Harness()
    add(harness, 1, TEXT[:3], (1, 9))
    harness.take()
    assert harness.error_of(1) == "request: the prompt has an image, the model takes none: send text alone"
    harness = new_harness(capacity=8)
    add(harness, 1, TEXT[:3], (1, 9))
    harness.take()
    assert "an image becomes 9 embeddings, the encoder cache holds 8" in harness.error_of(1)


def test_an_image_that_kills_workers_is_found() -> None:
    harness = new_harness()
    killer = image_digest(3)
    for key in range(4):
        add(harness, key, TEXT[: 3 + key], (key, 9), TEXT[:3])
    harness.run_with_deadly_workers(
        lambda: any(each.digest == killer for step in harness.worker.queue[:1] for each in step.encodes)
    )
    assert [harness.finished[key].reason for key in range(4)] == ["length"] * 3 + ["error"]
    assert "given up" in harness.error_of(3)


class Pace:
    """16 rows that decode in 1 s a step, while images arrive."""

    def __init__(
        self,
        num_rows: int = 16,
        layer_s: float = 0.1,
        num_layers: int = 38,
        max_products: float = math.inf,
        **more: int,
    ) -> None:
        self.harness = new_harness(num_layers=num_layers, steps_in_flight=1, max_num_seqs=32, num_blocks=2000, **more)
        self.harness.core.media.encodes.max_products = max_products
        self.harness.worker.step_s, self.harness.worker.encode_s = 1.0, layer_s / 9
        self.harness.worker.token_s = 0.0001
        for key in range(num_rows):
            add(self.harness, key, TEXT[:3], max_tokens=200)
        for _ in range(5):
            self.turn()

    def turn(self) -> tuple[float, int]:
        """Return the seconds that the step has taken and its pieces."""
        self.harness.core.step()
        queue = self.harness.worker.queue
        num_pieces = sum(encode.num_pieces for step in queue for encode in step.encodes)
        result = self.harness.worker.answer()
        if result is None:
            return 0.0, 0
        self.harness.core.on_result(result)
        self.harness.take()
        return result.execute_s, num_pieces


def test_an_image_takes_the_share_of_the_pacer_beside_decoding_rows() -> None:
    pace = Pace()
    add(pace.harness, 50, TEXT[:3], (1, 9), TEXT[:3])
    turns = [pace.turn() for _ in range(14)]
    assert max(seconds for seconds, _ in turns) <= 1 + SHARE + 0.01
    pieces = [count for _, count in turns if count]
    assert sum(pieces) == 40 and pieces[2:-2] == [5] * len(pieces[2:-2]), "the share is used up"
    add(pace.harness, 51, TEXT[:7], (2, 9), TEXT[:3])
    add(pace.harness, 52, TEXT[:7], (3, 9), TEXT[:3])
    turns = [pace.turn() for _ in range(20)]
    assert max(seconds for seconds, _ in turns) <= 1 + SHARE + 0.01
    assert sum(count for _, count in turns) == 80


def pace_of(num_rows: int, encode_s: float) -> tuple[Pace, float]:
    """Return rows that decode with known costs of prompts, and the seconds of their steps."""
    pace = Pace(num_rows=0, max_num_batched_tokens=512)
    harness, worker = pace.harness, pace.harness.worker
    worker.step_s, worker.token_s, worker.encode_s = 0.2, 0.05, encode_s
    add(harness, 1, TEXT * 5, max_tokens=1)
    harness.run()  # teaches the cost of prompt tokens
    for key in range(10, 10 + num_rows):
        add(harness, key, TEXT[:3], max_tokens=200)
    for _ in range(5):
        pace.turn()
    return pace, worker.step_s + num_rows * worker.token_s


def test_rows_that_wait_for_images_are_no_burst_of_prompts() -> None:
    pace, decode_s = pace_of(16, 0.1 / 9)
    harness, worker = pace.harness, pace.harness.worker
    for key in range(50, 55):
        add(harness, key, (key, 19), [*TEXT, key])
    turns = [pace.turn() for _ in range(40)]
    assert sum(count for _, count in turns) > 60 and harness.tokens[50]
    assert max(seconds for seconds, _ in turns) <= (1 + SHARE) * decode_s + 19 * worker.encode_s + 0.05


def test_an_image_is_encoded_at_once_if_nothing_decodes_or_if_thrice_as_many_images_wait_as_rows_decode() -> None:
    pace = Pace(num_rows=0)
    add(pace.harness, 50, TEXT[:3], (1, 9), TEXT[:3])
    assert pace.turn()[1] == 40
    pace = Pace(num_rows=1)
    for key in range(50, 53):
        add(pace.harness, key, TEXT[:3], (key, 9), TEXT[:3])
    assert pace.turn()[1] == 3 * 40


def test_a_step_with_an_image_may_take_longer_before_workers_count_as_hung() -> None:
    pace = Pace(num_rows=1)
    usual = pace.harness.core.step_timer
    pace.harness.core.step()
    without = pace.harness.core.overdue_at
    pace.harness.answer()
    add(pace.harness, 50, (1, 9), TEXT[:3])
    pace.harness.core.step()
    assert pace.harness.worker.queue[-1].encodes and usual.age_s < 1
    overdue_at = pace.harness.core.overdue_at
    assert without is not None and overdue_at is not None and overdue_at > without + 60
