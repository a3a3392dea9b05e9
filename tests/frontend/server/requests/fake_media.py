"""A model that takes media, in tests: a medium is any text, and shows as many tokens as it has characters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tokenloom.frontend.server.requests.media.media_input import MediaInput, ReadMedium
from tokenloom.frontend.server.text.media_marker import MediaMarker
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.media import MediaKind, MediaSpan
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.tests.support.engine_specs import in_folder, new_spec

MARKER, BAD = "#", b"bad"


class FakeMedium(NamedTuple):
    digest: bytes
    grid: tuple[int, int, int]


class FakePiece(NamedTuple):
    digest: bytes
    grid: tuple[int, int, int]
    start_s: float
    end_s: float


class FakeReader:
    """`reads` counts readings by their bytes; those in `held` wait until they are removed."""

    def __init__(self) -> None:
        self.reads: Counter[bytes] = Counter()
        self.held: set[bytes] = set()
        self.is_closed = False

    def __call__(self, store: BlobStore) -> FakeReader:
        self.store = store
        return self

    async def read(self, source: bytes, kind: MediaKind, detail: str, owner: str) -> ReadMedium:
        content = self.store.open(source)
        assert content is not None, "a source that is read is pinned"
        data = bytes(content)
        self.reads[data] += 1
        while data in self.held:
            await asyncio.sleep(0.01)
        if data == BAD:
            raise RequestError("this is no image")
        digest = await asyncio.to_thread(self.store.put, b"file of " + data + detail.encode())
        return FakeMedium(digest, (1, 1, len(data)))

    def close(self) -> None:
        self.is_closed = True


class FakePlaceholders:
    marker = MediaMarker("image", MARKER, MARKER)

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def before_tokenization(self, text: str) -> str:
        return text

    def expand(self, token_ids: Sequence[int], items: Sequence[ReadMedium]) -> tuple[list[int], list[MediaSpan]]:
        if (num_markers := list(token_ids).count(self.token_id)) != len(items):
            raise RequestError(f"the prompt has {num_markers} placeholders, but {len(items)} images")
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        for token_id in token_ids:
            length = 1
            if token_id == self.token_id:
                item = items[len(spans)]
                length = item.grid[2]
                start = len(expanded)
                spans.append(
                    MediaSpan(digest=item.digest, start=start, length=length, num_embeds=length, grid=item.grid)
                )
            expanded += [token_id] * length
        return expanded, spans


def fake_media(token_id: int) -> tuple[MediaInput, FakeReader]:
    reader = FakeReader()
    return MediaInput(reader, FakePlaceholders(token_id)), reader


def seeing_spec(folder: Any, token_id: int, **config: Any) -> EngineSpec:
    """Return the specification of an engine with a model that sees images and its run directory in `folder`."""
    spec = new_spec(config=EngineConfig(**config))
    vision = VisionConfig(family="llava", image_token_id=token_id, hidden_size=8, num_layers=1, patch_size=14)
    return in_folder(spec, folder, model=msgspec.structs.replace(spec.model, vision=vision))
