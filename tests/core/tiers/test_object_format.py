"""The object format: its layout, and that no damaged object is taken for a good one."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash

from tokenloom.core.tiers.object_format import HEADER_BYTES, VERSION, find_defect, write_header
from tokenloom.tests.core.tiers.slots import NAMESPACE, content_of, key_of

KEY, PAYLOAD = key_of(0), content_of(key_of(0), 320)
NUM_MUTATIONS = 100_000
OFFSETS = {"magic": 0, "version": 8, "zero": 12, "length": 16, "owner": 24, "namespace": 32, "key": 64, "payload": 96}


def new_page(owner: int = 5) -> bytearray:
    page = bytearray(HEADER_BYTES)
    write_header(memoryview(page), NAMESPACE.digest, KEY, PAYLOAD, owner)
    return page


def test_the_header_is_the_documented_one() -> None:
    fields = struct.pack("<8sIIQQ", b"kvblock\n", 1, 0, 320, 5) + NAMESPACE.digest + KEY
    page = (fields + xxhash.xxh3_128(PAYLOAD).digest()).ljust(4080, b"\0")
    assert bytes(new_page()) == page + xxhash.xxh3_128(page).digest()
    assert find_defect(new_page(), NAMESPACE.digest, KEY, PAYLOAD) is None


def test_no_mutated_object_is_accepted() -> None:
    rng = np.random.default_rng(0)
    page, payload = new_page(), bytearray(PAYLOAD)
    whole = len(page) + len(payload)
    places, widths = rng.integers(0, whole, NUM_MUTATIONS), rng.integers(1, 9, NUM_MUTATIONS)
    noise = rng.integers(1, 256, (NUM_MUTATIONS, 8), dtype=np.uint8)  # never 0: each mutation changes something
    places[: NUM_MUTATIONS // 2] %= 112  # half of them in the fields
    for place, width, mask in zip(places.tolist(), widths.tolist(), noise, strict=True):
        part, start = (page, place) if place < len(page) else (payload, place - len(page))
        kept = part[start : start + width]
        part[start : start + width] = bytes(old ^ new for old, new in zip(kept, mask.tolist(), strict=False))
        assert find_defect(page, NAMESPACE.digest, KEY, payload) is not None, f"{width} bytes at {place}"
        part[start : start + width] = kept
    assert find_defect(page, NAMESPACE.digest, KEY, payload) is None


@pytest.mark.parametrize("field", OFFSETS)
@pytest.mark.parametrize("is_consistent", [False, True])
def test_a_flipped_bit_in_a_field_is_found_even_if_the_checksum_covers_it(field: str, is_consistent: bool) -> None:
    page = new_page()
    page[OFFSETS[field]] ^= 1
    if is_consistent:
        page[-16:] = xxhash.xxh3_128(page[:-16]).digest()
    reasons = {"magic": "version", "version": "version", "length": "length", "namespace": "key", "key": "key"}
    expected = reasons.get(field, "checksum") if is_consistent or field in ("magic", "version") else "checksum"
    if is_consistent and field in ("zero", "owner"):  # they decide nothing about the content
        assert find_defect(page, NAMESPACE.digest, KEY, PAYLOAD) is None
    else:
        assert find_defect(page, NAMESPACE.digest, KEY, PAYLOAD) == expected


def test_another_object_at_this_place_is_found() -> None:
    page = new_page()
    assert find_defect(page, NAMESPACE.digest, key_of(1), PAYLOAD) == "key"
    assert find_defect(page, key_of(1), KEY, PAYLOAD) == "key"
    assert find_defect(page, NAMESPACE.digest, KEY, PAYLOAD[:-1]) == "length"
    assert find_defect(page[:-1], NAMESPACE.digest, KEY, PAYLOAD) == "length"
    assert find_defect(bytes(HEADER_BYTES), NAMESPACE.digest, KEY, PAYLOAD) == "version"
    assert VERSION == 1
