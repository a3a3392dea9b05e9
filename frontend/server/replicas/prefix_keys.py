"""Keys of prompt prefixes, by which the router knows prompts that begin alike.

A key is 8 bytes of a SHA-256 chain over pieces of KEY_TOKENS tokens, so equal keys mean equal tokens up to there. Keys
never leave the frontend: they are no KV block keys, and a core does not know them.
"""

from __future__ import annotations

import hashlib

KEY_TOKENS = 128  # a key for each; a shorter rest has none


def prefix_keys(token_ids: bytes, root: bytes = b"") -> list[int]:
    """Return the keys of the prefixes of 128, 256, … tokens. token_ids: int32. root: all else that decides whether KV
    blocks may be shared, such as the digest of an adapter and a cache salt."""
    digest = hashlib.sha256(root).digest()
    keys = []
    for end in range(4 * KEY_TOKENS, len(token_ids) + 1, 4 * KEY_TOKENS):
        digest = hashlib.sha256(digest + token_ids[end - 4 * KEY_TOKENS : end]).digest()
        keys.append(int.from_bytes(digest[:8], "little"))
    return keys
