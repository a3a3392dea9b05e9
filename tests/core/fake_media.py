"""The encoder cache of a FakeWorker, which checks every order and every read, and prompts with images."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.core.media_spans import end_of
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.messages.media import Encode, FailedEntry, MediaSpan
from tokenloom.ipc.messages.workers import SchedulerOutput
from tokenloom.ipc.spec.models.vision_config import VisionConfig

IMAGE = 996  # the placeholder
BREAK = 995  # a token that stands between placeholders


def image_digest(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def new_vision(num_layers: int = 4, *, is_bidirectional: bool = False) -> VisionConfig:
    return VisionConfig(
        family="gemma3" if is_bidirectional else "llava",
        image_token_id=IMAGE,
        hidden_size=8,
        num_layers=num_layers,
        patch_size=2,
        is_bidirectional=is_bidirectional,
    )


def with_images(parts: Sequence[list[int] | tuple[int, int]]) -> tuple[list[int], list[MediaSpan]]:
    """Return the prompt of texts and images, each the number of an image and its tokens, and the spans. The last but
    one token of an image with an even number of tokens is no placeholder."""
    tokens, media = list[int](), list[MediaSpan]()
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        number, length = part
        has_break = length > 2 and length % 2 == 0
        media.append(
            MediaSpan(
                digest=image_digest(number),
                start=len(tokens),
                length=length,
                num_embeds=length - has_break,
                grid=(1, number, length),
            )
        )
        tokens += [IMAGE] * length
        if has_break:
            tokens[-2] = BREAK
    return tokens, media


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


def seen(tokens: Sequence[int], media: Sequence[MediaSpan]) -> list[int]:
    """Return the tokens with a number in place of each placeholder that tells its image and its place in it."""
    content = list(tokens)
    for span in media:
        for i in range(span.start, end_of(span)):
            if content[i] == IMAGE:
                data = span.digest + (i - span.start).to_bytes(4, "little")
                content[i] = 1000 + int.from_bytes(hashlib.sha256(data).digest()[:3], "little")
    return content


@dataclass
class _Entry:
    order: Encode
    num_left: int  # pieces


class FakeEncoder:
    """Entries by number. `broken`: media without files. `damaged`: those that turn out to be so with the last piece."""

    def __init__(self, capacity: int, num_stages: int) -> None:
        self.capacity, self.num_stages = capacity, num_stages
        self.entries: dict[int, _Entry] = {}
        self.broken, self.damaged = set[bytes](), set[bytes]()
        self.num_begun: Counter[bytes] = Counter()
        self._failed: set[int] = set()

    def drop(self) -> None:
        self.entries.clear()
        self._failed.clear()

    def run(self, output: SchedulerOutput) -> list[FailedEntry]:
        """Free the entries of a step and run its encodes; return those that fail."""
        for number in decode_ids(output.freed_entries):
            del self.entries[number]
        failed = [each for encode in output.encodes if (each := self._encode(encode)) is not None]
        assert sum(each.order.num_embeds for each in self.entries.values()) <= self.capacity
        assert sum(each.num_left > 0 for each in self.entries.values()) <= 1, "two are half encoded"
        return failed

    def _encode(self, order: Encode) -> FailedEntry | None:
        assert order.entry >= 1 and order.num_pieces >= 1
        if order.first_piece == 0:
            assert order.entry not in self.entries, "an entry is used twice"
            assert all(each.order.digest != order.digest for each in self.entries.values()), "a medium is encoded twice"
            self._failed.discard(order.entry)
            if order.digest in self.broken:
                self._failed.add(order.entry)
                return FailedEntry(entry=order.entry, error="the file is missing: send it again")
            self.num_begun[order.digest] += 1
            self.entries[order.entry] = _Entry(order, self.num_stages * order.pieces_per_stage)
        elif order.entry in self._failed:
            return None
        entry = self.entries[order.entry]
        num_done = self.num_stages * order.pieces_per_stage - entry.num_left
        assert entry.order.digest == order.digest and num_done == order.first_piece, "pieces out of order"
        entry.num_left -= order.num_pieces
        assert entry.num_left >= 0
        if order.digest not in self.damaged or entry.num_left:
            return None
        del self.entries[order.entry]
        return FailedEntry(entry=order.entry, error="the file is damaged: send it again")

    def digest_in(self, number: int) -> bytes:
        """Return the medium in a complete entry."""
        entry = self.entries[number]
        assert entry.num_left == 0, "a row reads an entry that is half encoded"
        return entry.order.digest


def random_prompt(
    rng: random.Random, num_images: int, longest: int, text: list[int]
) -> list[list[int] | tuple[int, int]]:
    """Draw a prompt of texts, cut from `text`, and images."""
    parts: list[list[int] | tuple[int, int]] = []
    for _ in range(rng.randrange(4)):
        parts.append(text[: rng.randrange(12)])
        if rng.random() < 0.7:
            number = rng.randrange(num_images)
            parts.append((number, 1 + number * 7 % longest))  # the size of an image is its own
    return [*parts, text[: rng.randrange(0 if parts and isinstance(parts[-1], tuple) else 1, 8)]]
