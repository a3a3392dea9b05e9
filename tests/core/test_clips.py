"""Requests of a model with cross attention, whose audio clips are whole blocks at their heads: each clip is encoded and
written once, requests share its blocks, and no block behind a clip is ever read under another one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.tests.core.fake_media import IMAGE, image_digest, new_vision, seen
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness, prompt_of
from tokenloom.tests.core.test_random_media import MediaOperations

BLOCK_SIZE, NUM_BLOCKS_OF_CLIP = 4, 5
TEXT = prompt_of(random.Random(1), 30)


def clip_at_head(number: int, text: list[int], num_tokens: int, num_rows: int) -> tuple[list[int], list[MediaSpan]]:
    """Return the prompt of a clip and a text, and its span."""
    span = MediaSpan(
        kind="audio",
        digest=image_digest(number),
        start=0,
        length=num_tokens,
        num_embeds=num_rows,
        grid=(1, 1, number + 1),
    )
    return [IMAGE] * num_tokens + text, [span]


def new_harness(**options: object) -> Harness:
    sizes = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 16, **options}
    return Harness(vision=new_vision(3), encoder_cache=64, max_item_embeds=20, **sizes)  # type: ignore[arg-type]


def add(harness: Harness, key: int, number: int, text: list[int], max_tokens: int = 6) -> None:
    prompt, media = clip_at_head(number, text, BLOCK_SIZE * NUM_BLOCKS_OF_CLIP, 18)
    harness.add(key, prompt, max_tokens, media=media)


def test_equal_clips_are_encoded_and_written_once_and_share_their_blocks() -> None:
    harness = new_harness()
    add(harness, 1, number=1, text=TEXT[:6])
    harness.run_to_the_end()
    num_computed = harness.worker.num_computed_tokens
    for key, text in ((2, TEXT[:6]), (3, TEXT[:3]), (4, TEXT[5:9])):
        add(harness, key, number=1, text=text)
    harness.run_to_the_end()
    assert harness.worker.encoder.num_begun == {image_digest(1): 1}
    clip = BLOCK_SIZE * NUM_BLOCKS_OF_CLIP
    assert [harness.cached[key] for key in (2, 3, 4)] == [clip + BLOCK_SIZE, clip, clip]
    new_tokens = sum(len(text) + 5 for text in (TEXT[:6], TEXT[:3], TEXT[5:9])) - BLOCK_SIZE
    assert harness.worker.num_computed_tokens == num_computed + new_tokens, "the clip was not written again"


def test_equal_tokens_behind_other_clips_are_no_hits() -> None:
    harness = new_harness()
    for key in (1, 2):
        add(harness, key, number=key, text=TEXT[:20])
        harness.run_to_the_end()
    assert harness.cached[2] == 0
    assert harness.tokens[1] != harness.tokens[2]


def test_requests_with_one_clip_at_once_write_it_into_their_own_blocks_from_one_entry() -> None:
    harness = new_harness()
    for key in range(4):
        add(harness, key, number=1, text=TEXT[: 3 + key])
    harness.run_to_the_end()
    assert harness.worker.encoder.num_begun == {image_digest(1): 1}


def test_a_preempted_request_finds_its_clip_and_needs_no_other_encode() -> None:
    harness = new_harness(num_blocks=19, max_num_batched_tokens=64)
    for key in range(3):
        add(harness, key, number=key, text=TEXT[:4], max_tokens=12)
    harness.run_to_the_end()
    assert harness.core.scheduler.num_preemptions > 0
    assert all(count == 1 for count in harness.worker.encoder.num_begun.values())


def test_a_new_core_finds_the_blocks_of_a_clip(tmp_path: Path) -> None:
    harness = new_harness(record=tmp_path / "blocks")
    add(harness, 1, number=1, text=TEXT[:6])
    harness.run_to_the_end()
    harness.lose_core(0)
    add(harness, 2, number=1, text=TEXT[:3])
    harness.run_to_the_end()
    assert harness.worker.encoder.num_begun == {image_digest(1): 1}
    assert harness.cached[2] == BLOCK_SIZE * NUM_BLOCKS_OF_CLIP


class ClipOperations(MediaOperations):
    """Random operations on requests with clips of whole blocks, longer than some chunks and shorter than others."""

    def add(self) -> None:
        if self.harness.core.num_requests >= 40:
            return
        rng, key, self.num_added = self.rng, self.num_added, self.num_added + 1
        block_size, number = self.harness.spec.config.block_size, rng.randrange(self.num_images)
        num_rows = 1 + number * 7 % self.longest
        num_tokens = -(-num_rows // block_size) * block_size
        prompt, media = clip_at_head(number, self.text[: rng.randrange(1, 12)], num_tokens, num_rows)
        max_tokens = rng.randrange(1, 20)
        outputs = expected_tokens(seen(prompt, media), key, max_tokens, [])[: rng.choice([0, 0, 0, 5])]
        self.harness.add(key, prompt, max_tokens, outputs=outputs, media=media, priority=rng.randrange(-2, 3))


def run_random_operations(seed: int, folder: Path, num_operations: int) -> None:
    operations = ClipOperations(seed, folder / f"blocks-{seed}", is_bidirectional=False)
    operations.run(num_operations)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_with_clips_keep_every_invariant(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.core.scheduling.encode_queue.PRODUCTS_PER_WEIGHT", (1e-9, 1e-2, 2.7)[seed % 3])
    run_random_operations(seed, tmp_path, 400)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_50_000_random_operations_with_clips_keep_every_invariant(tmp_path: Path) -> None:
    for seed in range(100, 150):
        run_random_operations(seed, tmp_path, 1000)
