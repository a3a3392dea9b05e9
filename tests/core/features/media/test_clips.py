"""Requests of a model with cross attention, whose audio clips are whole blocks at their heads: each clip is encoded and
written once, requests share its blocks, and no block behind a clip is ever read under another one."""

from __future__ import annotations

import random
from pathlib import Path

from tokenloom.tests.core.fake_media import clip_at_head, image_digest, new_vision
from tokenloom.tests.core.harness import Harness, prompt_of

BLOCK_SIZE, NUM_BLOCKS_OF_CLIP = 4, 5
TEXT = prompt_of(random.Random(1), 30)


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
