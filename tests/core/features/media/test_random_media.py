"""Any order of adds, aborts, missing files, reloads and losses keeps every invariant, with more images than fit into
the encoder cache. The worker checks that each placeholder is computed from its own image, complete and still there,
that no block is read under another image, and that no step ends within a bidirectional span."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import pytest

from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.tests.core.fake_media import clip_at_head, image_digest, new_vision, random_prompt, seen, with_images
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.random_operations import RandomOperations
from tokenloom.tests.support.today import seeds


class MediaOperations(RandomOperations):
    """A core with a small encoder cache."""

    weights: ClassVar[dict[str, float]] = RandomOperations.weights | {"reload": 0.5, "lose_file": 0.5, "find_file": 0.5}
    may_be_bidirectional = True

    def __init__(self, seed: int, record: Path) -> None:
        rng = random.Random(seed)
        self.longest, self.num_images = rng.choice([1, 5, 20]), rng.choice([2, 5, 12])
        is_bidirectional = self.may_be_bidirectional and rng.random() < 0.3
        super().__init__(
            seed,
            record,
            num_new_tokens=rng.choice([lambda: 1, lambda: rng.randrange(3)]),
            long_prefill_token_threshold=rng.choice([0, 0, 2, 7]),
            vision=new_vision(rng.choice([1, 2, 7]), is_bidirectional=is_bidirectional),
            encoder_cache=self.longest + rng.choice([0, 3, 20]),
            max_item_embeds=self.longest,
            products_per_weight=rng.choice([1e-9, 1e-2, 2.7]),
        )
        self.encode_s = rng.choice([0.0, 0.02, 0.3])
        self.give_speed()

    def give_speed(self) -> None:
        self.harness.worker.step_s, self.harness.worker.encode_s = 1.0, self.encode_s

    def end(self) -> None:
        super().end()
        media = self.harness.core.media
        assert not media.left and not any(entry.num_refs for entry in media.encodes.cache.entries())

    def draw_media(self) -> tuple[list[int], list[MediaSpan]]:
        return with_images(random_prompt(self.rng, self.num_images, self.longest, self.stems[0]))

    def add_request(self, key: int) -> None:
        rng, (prompt, media) = self.rng, self.draw_media()
        priority, max_tokens = rng.randrange(-2, 3), rng.randrange(1, 20)
        if rng.random() < 0.2:
            self.harness.add(key, prompt, pooling=self.draw_pooling(), media=media, priority=priority)
            return
        outputs = expected_tokens(seen(prompt, media), key, max_tokens, [])[: rng.choice([0, 0, 0, 5])]
        params = {"priority": priority, "prompt_logprobs": rng.choice([None, None, None, 1])}
        self.harness.add(key, prompt, max_tokens, outputs=outputs, media=media, **params)

    def lose_worker(self) -> None:
        super().lose_worker()
        self.give_speed()

    def lose_file(self) -> None:
        bad = self.rng.choice([self.harness.broken, self.harness.damaged])
        bad.add(image_digest(self.rng.randrange(self.num_images)))

    def find_file(self) -> None:
        """Requests that have ended meanwhile stay ended."""
        for key, finished in self.harness.finished.items():
            if finished.reason == "error" and self.harness.media[key]:
                return
        self.harness.broken.clear()
        self.harness.damaged.clear()


class ClipOperations(MediaOperations):
    """Requests with clips of whole blocks at their heads, longer than some chunks and shorter than others."""

    may_be_bidirectional = False

    def draw_media(self) -> tuple[list[int], list[MediaSpan]]:
        block_size, number = self.harness.spec.config.block_size, self.rng.randrange(self.num_images)
        num_rows = 1 + number * 7 % self.longest
        num_tokens = -(-num_rows // block_size) * block_size
        return clip_at_head(number, self.stems[0][: self.rng.randrange(1, 12)], num_tokens, num_rows)


@pytest.mark.parametrize("seed", seeds(8, 92))
def test_random_operations_with_images_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    MediaOperations(seed, tmp_path / "blocks").run(500)


@pytest.mark.parametrize("seed", seeds(4, 46))
def test_random_operations_with_clips_keep_every_invariant(seed: int, tmp_path: Path) -> None:
    ClipOperations(seed, tmp_path / "blocks").run(400)
