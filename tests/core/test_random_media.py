"""Any order of adds, aborts, missing files, reloads and losses keeps every invariant, with more images than fit into
the encoder cache. The worker checks that each placeholder is computed from its own image, complete and still there,
that no block is read under another image, and that no step ends within a bidirectional span."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenloom.ipc.pooling_params import PoolingParams
from tokenloom.tests.core.fake_media import image_digest, new_vision, random_prompt, seen, with_images
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.core.harness import Harness, prompt_of, random_sizes


class MediaOperations:
    """A core with a small encoder cache, and random operations on it."""

    def __init__(self, seed: int, record: Path, *, is_bidirectional: bool | None = None) -> None:
        """`is_bidirectional`: of the images; None: it is drawn."""
        self.rng = rng = random.Random(seed)
        self.longest = rng.choice([1, 5, 20])
        self.num_images = rng.choice([2, 5, 12])
        is_drawn = rng.random() < 0.3
        is_bidirectional = is_drawn if is_bidirectional is None else is_bidirectional
        self.harness = Harness(
            record=record,
            num_new_tokens=rng.choice([lambda: 1, lambda: rng.randrange(3)]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 0, 2, 7]),
            vision=new_vision(rng.choice([1, 2, 7]), is_bidirectional=is_bidirectional),
            encoder_cache=self.longest + rng.choice([0, 3, 20]),
            max_item_embeds=self.longest,
            **random_sizes(rng),  # type: ignore[arg-type]
        )
        self.harness.worker.step_s = 1.0
        self.harness.worker.encode_s = rng.choice([0.0, 0.02, 0.3])
        self.text = prompt_of(rng, 12)
        self.num_added = 0

    def run(self, num_operations: int) -> None:
        operations = {
            self.add: 14,
            self.abort: 3,
            self.lose_worker: 0.5,
            self.lose_core: 1.5,
            self.reload: 0.5,
            self.lose_file: 0.5,
            self.find_file: 0.5,
        }
        for _ in range(num_operations):
            if (draw := self.rng.random()) < 0.2:
                self.rng.choices(list(operations), list(operations.values()))[0]()
            elif draw < 0.6:
                self.harness.core.step()
            else:
                self.harness.answer()
            self.harness.core.scheduler.check_invariants()
        self.harness.run_to_the_end()
        media = self.harness.core.scheduler.media
        assert not media.left and not any(entry.num_refs for entry in media.encodes.cache.entries())

    def add(self) -> None:
        if self.harness.core.num_requests >= 40:
            return
        rng, key, self.num_added = self.rng, self.num_added, self.num_added + 1
        prompt, media = with_images(random_prompt(rng, self.num_images, self.longest, self.text))
        max_tokens = rng.randrange(1, 20)
        outputs = expected_tokens(seen(prompt, media), key, max_tokens, [])[: rng.choice([0, 0, 0, 5])]
        pooling = PoolingParams(method=rng.choice(["last", "mean"])) if rng.random() < 0.2 else None
        outputs = [] if pooling is not None else outputs
        params = {"priority": rng.randrange(-2, 3), "prompt_logprobs": rng.choice([None, None, None, 1])}
        params |= {} if pooling is None else {"prompt_logprobs": None}
        self.harness.add(key, prompt, max_tokens, outputs=outputs, media=media, pooling=pooling, **params)

    def abort(self) -> None:
        if self.num_added:
            self.harness.abort(self.rng.randrange(self.num_added))

    def lose_worker(self) -> None:
        worker = self.harness.worker
        self.harness.lose_worker()
        self.harness.worker.step_s, self.harness.worker.encode_s = worker.step_s, worker.encode_s

    def lose_core(self) -> None:
        self.harness.lose_core(self.rng.randrange(3), with_worker=self.rng.random() < 0.2)

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

    def reload(self) -> None:
        """Other weights are loaded: the engine is quiet, and the workers drop their entries."""
        harness = self.harness
        harness.core.pause("keep")
        while harness.core.scheduler.ledger.entries:
            harness.answer()
        harness.core.forget_computed()
        harness.core.scheduler.take_step()
        harness.worker.reload()
        harness.core.resume()


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_with_images_keep_every_invariant(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.core.scheduling.encode_queue.PRODUCTS_PER_WEIGHT", (1e-9, 1e-2, 2.7)[seed % 3])
    MediaOperations(seed, tmp_path / "blocks").run(500)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_100_000_random_operations_with_images_keep_every_invariant(tmp_path: Path) -> None:
    for seed in range(100, 200):
        MediaOperations(seed, tmp_path / f"blocks-{seed}").run(1000)
