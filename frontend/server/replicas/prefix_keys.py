"""Keys of prompt prefixes, by which the router recognizes prompts with the same start.

A key is 8 bytes of a SHA-256 chain over pieces of KEY_TOKENS tokens, so equal keys mean equal tokens up to that place.
Keys never leave the frontend: they are not the keys of KV blocks, and cores do not know them.
"""

from __future__ import annotations

import hashlib

KEY_TOKENS = 128  # tokens for each key; a shorter rest has no key


def prefix_keys(token_ids: bytes, root: bytes = b"") -> list[int]:
    """Return the keys of the prefixes of 128, 256, … tokens. token_ids: int32. root: everything else that decides
    whether KV blocks may be shared, such as an adapter's digest and a cache salt."""
    digest = hashlib.sha256(root).digest()
    keys = []
    for end in range(4 * KEY_TOKENS, len(token_ids) + 1, 4 * KEY_TOKENS):
        digest = hashlib.sha256(digest + token_ids[end - 4 * KEY_TOKENS : end]).digest()
        keys.append(int.from_bytes(digest[:8], "little"))
    return keys
