"""Sealed objects: the MAC is a keyed BLAKE2b over all bytes, and each changed byte is noticed."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from tokenloom.core.tiers.network.sealed_format import MAC_BYTES, SealedFormat
from tokenloom.core.tiers.object_format import HEADER_BYTES
from tokenloom.tests.core.tiers.slots import (
    NAMESPACE,
    SECRET,
    SIGNED,
    content_of,
    key_of,
)

KEY, PAYLOAD = key_of(1), content_of(key_of(1))


def test_the_mac_is_keyed_blake2b_of_header_and_payload() -> None:
    head, tail = SealedFormat(SIGNED).seal(KEY, PAYLOAD)
    mac_key = blake2b(SECRET, digest_size=32, person=b"kv object").digest()
    assert tail == blake2b(head + PAYLOAD, digest_size=MAC_BYTES, key=mac_key).digest()
    assert SealedFormat(SIGNED).num_bytes(len(PAYLOAD)) == len(head + PAYLOAD + tail)


def test_without_a_secret_there_is_no_mac() -> None:
    head, tail = SealedFormat(NAMESPACE).seal(KEY, PAYLOAD)
    assert tail == b"" and len(head) == HEADER_BYTES
    assert SealedFormat(NAMESPACE).find_defect(KEY, head, PAYLOAD, tail) is None


@pytest.mark.parametrize("part", range(3))
def test_a_changed_byte_is_a_defect(part: int) -> None:
    form = SealedFormat(SIGNED)
    head, tail = form.seal(KEY, PAYLOAD)
    parts = [bytearray(head), bytearray(PAYLOAD), bytearray(tail)]
    assert form.find_defect(KEY, *parts) is None
    for at in range(0, len(parts[part]), 97):
        parts[part][at] ^= 0x40
        assert form.find_defect(KEY, *parts) is not None, at
        parts[part][at] ^= 0x40


def test_a_forged_object_needs_the_secret_even_if_all_checksums_fit() -> None:
    forger = SealedFormat(SIGNED._replace(secret=b"a guess"))
    assert (
        SealedFormat(SIGNED).find_defect(KEY, *(forger.seal(KEY, PAYLOAD)[0], PAYLOAD, forger.seal(KEY, PAYLOAD)[1]))
        == "mac"
    )
