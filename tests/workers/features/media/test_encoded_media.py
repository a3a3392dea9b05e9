"""Entries are encoded by the core's orders; a medium that cannot be encoded fails alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tokenloom.ipc.blobs.media_file import media_header
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.media import Encode, FailedEntry
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.workers.encoders.images.image_items import random_item
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.encoders.encoder import Encoder
from tokenloom.workers.features.media.encoded_media import EncodedMedia
from tokenloom.workers.machine.parallel import ParallelGroup

WIDTH = 64


class Model(NamedTuple):
    encoder: Encoder
    vision: VisionConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = vision_checkpoint(tmp_path_factory.mktemp("model") / "qwen2_vl", "qwen2_vl")
    vision = load_model_config(folder).vision
    assert vision is not None
    return Model(Encoder.load(folder, vision, torch.float32, torch.device("cpu")), vision)


class Cache:
    """An EncodedMedia over a store with two media: "a" of 6 × 4 merged patches, "b" of 3 × 5."""

    def __init__(self, model: Model, folder: Path, group: ParallelGroup | None = None) -> None:
        self.model, self.store = model, BlobStore(folder, 1 << 24)
        self.items = {"a": random_item(model.vision, 1, 1, 6, 4), "b": random_item(model.vision, 2, 1, 3, 5)}
        self.digests = dict[str, bytes]()
        for name, item in self.items.items():
            self.digests[name] = self.store.put(media_header(item.grid, item.shape) + bytes(item.data))
        readers = BlobStore(folder, 1 << 24)
        self.cache = EncodedMedia(model.encoder, model.vision, WIDTH, readers, group or ParallelGroup())

    def order(self, entry: int, name: str = "a", first: int = 0, count: int | None = None, **more: int) -> Encode:
        item = self.items[name]
        return Encode(
            entry=entry,
            digest=self.digests[name],
            grid=item.grid,
            num_embeds=more.get("num_embeds", {"a": 24, "b": 15}[name]),
            pieces_per_stage=more.get("pieces_per_stage", 1),
            first_piece=first,
            num_pieces=len(self.model.vision.stages) - first if count is None else count,
        )

    def expected(self, name: str) -> Tensor:
        item = self.items[name]
        return self.model.encoder.finish(self.model.encoder.begin(item, item.grid))


@pytest.fixture
def cache(model: Model, tmp_path: Path) -> Cache:
    return Cache(model, tmp_path)


def test_pieces_of_several_entries_may_alternate(cache: Cache) -> None:
    for first in range(len(cache.model.vision.stages)):
        for entry, name in ((1, "a"), (5, "b"), (2, "a")):
            assert cache.cache.encode(cache.order(entry, name, first, 1)) is None
    for entry, name in ((1, "a"), (5, "b"), (2, "a")):
        assert torch.equal(cache.cache.take(entry, 0, 15), cache.expected(name)[:15])
    assert torch.equal(cache.cache.take(1, 7, 4), cache.expected("a")[7:11])


def test_entries_are_free_after_an_order_to_free_or_to_clear(cache: Cache) -> None:
    cache.cache.encode(cache.order(1))
    cache.cache.encode(cache.order(2, count=1))
    cache.cache.free([1, 2])
    with pytest.raises(ProtocolError, match="not complete"):
        cache.cache.take(1, 0, 1)
    cache.cache.encode(cache.order(2, "b"))
    cache.cache.clear()
    assert cache.cache.num_entries == 0
    cache.cache.encode(cache.order(1))
    with pytest.raises(ProtocolError, match="not in use"):
        cache.cache.free([2])


def test_orders_that_do_not_follow_those_before_are_refused(cache: Cache) -> None:
    cache.cache.encode(cache.order(1, count=1))
    others = (cache.order(2, first=1), cache.order(3, count=99), cache.order(1, first=1, count=1, pieces_per_stage=2))
    for order in (cache.order(1), cache.order(1, first=2), *others):
        with pytest.raises(ProtocolError, match="are ordered for entry"):
            cache.cache.encode(order)
    cache.cache.encode(cache.order(1, first=1))
    with pytest.raises(ProtocolError, match="which is in use"):
        cache.cache.encode(cache.order(1))
    with pytest.raises(ProtocolError, match="has 24 embeddings"):
        cache.cache.take(1, 20, 5)


def check_failure(cache: Cache, failed: FailedEntry | None, words: str) -> None:
    """The failure is reported, what else was ordered for the entry does nothing, and it has zeros."""
    assert failed is not None
    assert failed.entry == 3
    assert words in failed.error
    assert "send" in failed.error
    assert cache.cache.encode(cache.order(3, first=1)) is None
    assert not cache.cache.take(3, 0, 24).any()
    assert cache.cache.encode(cache.order(4)) is None
    assert torch.equal(cache.cache.take(4, 0, 24), cache.expected("a"))
    assert cache.cache.encode(cache.order(3, "b")) is None  # the core has given the entry to another medium
    assert torch.equal(cache.cache.take(3, 0, 15), cache.expected("b"))


@pytest.mark.parametrize(
    ("digest_of", "words"),
    [
        (lambda cache: bytes(32), "no longer in the engine's store"),
        (
            lambda cache: cache.store.put(b"no media file, but long enough to hold a header, which it does not"),
            "header says",
        ),
        (lambda cache: cache.digests["b"], "its prompt says (1, 2, 2)"),
    ],
    ids=["missing", "damaged", "of another size"],
)
def test_a_file_that_is_not_the_prompts_fails_its_entry_alone(
    cache: Cache, digest_of: Callable[[Cache], bytes], words: str
) -> None:
    order = Encode(entry=3, digest=digest_of(cache), grid=(1, 2, 2), num_embeds=24, first_piece=0, num_pieces=1)
    check_failure(cache, cache.cache.encode(order), words)
    cache.cache.free([3])
    failed = cache.cache.encode(cache.order(3, num_embeds=23))
    assert failed is not None
    assert "24 embeddings and 23 placeholders" in failed.error


def test_files_are_closed_after_they_are_read(cache: Cache) -> None:
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + Path("/proc/self/maps").read_text().count(
            str(cache.store.folder.path)
        )

    before = num_open()
    for entry in range(1, 9):
        cache.cache.encode(cache.order(entry, "ab"[entry % 2], count=1))
    cache.cache.encode(Encode(entry=9, digest=bytes(32), grid=(1, 2, 2), num_embeds=1, first_piece=0, num_pieces=1))
    assert num_open() == before


def test_a_medium_that_one_rank_cannot_read_fails_on_all(model: Model, tmp_path: Path) -> None:
    def run(group: ParallelGroup) -> None:
        mine = Cache(model, tmp_path / str(group.rank), group)
        if group.rank == 1:
            (tmp_path / "1" / mine.digests["a"].hex()).unlink()
        failed, fine = (mine.cache.encode(order) for order in (mine.order(1, "a"), mine.order(2, "b")))
        assert failed is not None
        assert failed.entry == 1
        assert fine is None
        assert torch.equal(mine.cache.take(2, 0, 15), mine.expected("b"))

    run_ranks(2, run)
