"""Keys of blocks with media: equal content has equal keys, and no other content has."""

from __future__ import annotations

import hashlib
import random

import pytest

from tokenloom.core.kv.block_hash import block_key, block_keys, object_name
from tokenloom.core.media_spans import end_of, event_extra, first_after, touching
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.tests.core.harness import prompt_of

ROOT = bytes(32)
IMAGE = 996  # the placeholder


def span(number: int, start: int, length: int) -> MediaSpan:
    return MediaSpan(digest=bytes([number]) * 32, start=start, length=length, num_embeds=length, grid=(1, 1, length))


def keys_of(tokens: list[int], *media: MediaSpan, size: int = 4) -> list[bytes]:
    return list(block_keys(ROOT, encode_ids(tokens), size, media))


def test_text_keeps_the_keys_that_are_on_disks() -> None:
    tokens = encode_ids([1, 2, 3, 4])
    assert block_key(ROOT, tokens) == hashlib.sha256(ROOT + tokens).digest()
    assert keys_of([1, 2, 3, 4, 5]) == [block_key(ROOT, tokens)]
    assert keys_of([1, 2, 3, 4, *[IMAGE] * 4], span(1, 4, 4))[0] == block_key(ROOT, tokens)


def test_a_block_of_the_first_group_is_named_by_its_key_and_those_of_others_apart() -> None:
    keys = keys_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert [object_name(key, 0) for key in keys] == keys
    assert object_name(keys[0], 3) == hashlib.sha256(keys[0] + b"group\3").digest()
    assert len({object_name(key, group) for key in keys for group in range(5)}) == 10


def test_equal_placeholders_of_other_images_have_other_keys_from_the_first_block_on_that_they_touch() -> None:
    tokens = [1, 2, 3, 4, 5, *[IMAGE] * 6, 6, 7, 8, 9, 10]
    one, other = keys_of(tokens, span(1, 5, 6)), keys_of(tokens, span(2, 5, 6))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, False]
    assert keys_of(tokens, span(1, 5, 6)) == one


def test_a_key_tells_where_in_an_image_its_block_begins() -> None:
    """Two images side by side, or one of twice the length, have the same placeholders."""
    tokens = [IMAGE] * 8
    cuts = [[span(1, 0, 8)], [span(1, 0, 4), span(1, 4, 4)], [span(1, 0, 2), span(1, 2, 6)], [span(1, 1, 7)]]
    assert len({keys_of(tokens, *media)[-1] for media in cuts}) == len(cuts)


def test_keys_may_be_computed_from_any_block_on() -> None:
    rng = random.Random(0)
    for _ in range(50):
        tokens, media = random_media(rng)
        keys = keys_of(tokens, *media)
        first = rng.randrange(len(keys))
        parent = keys[first - 1] if first else ROOT
        assert list(block_keys(parent, encode_ids(tokens[4 * first :]), 4, media, 4 * first)) == keys[first:]


def random_media(rng: random.Random) -> tuple[list[int], list[MediaSpan]]:
    tokens, media = prompt_of(rng, 40), list[MediaSpan]()
    edges = sorted(rng.sample(range(40), 6))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        media.append(span(rng.randrange(3), start, end - start))
        tokens[start:end] = [IMAGE] * (end - start)
    return tokens, media


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_found_as_by_a_look_at_each_token(seed: int) -> None:
    rng = random.Random(seed)
    _, media = random_media(rng)
    for start in range(40):
        end = rng.randrange(start + 1, 41)
        found = [each for each in media if any(each.start <= i < end_of(each) for i in range(start, end))]
        assert list(touching(media, start, end)) == found
        assert event_extra(media, start, end) == tuple((each.digest.hex(), each.start - start) for each in found)
        assert first_after(media, start) == sum(end_of(each) <= start for each in media)
