"""Bytes of a token, and an upper bound of the text bytes that one token can represent.

The limit allows refusing longer texts unread. A normalizer that shrinks text by a known factor (Unicode forms,
lowercase) raises the limit by that factor. There is no limit if text may vanish: by a normalizer that strips, a
pre-tokenizer that removes spaces, an added token that absorbs the spaces next to it, or an unknown word that becomes
one token. Each part in tokenizer.json is classified by its type; an unlisted type counts as one that drops text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

# The largest factor by which a normalizer shrinks a text: 𝐀 (4 bytes) becomes A, and no Unicode form shrinks by more.
_SHRINK = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = frozenset(("ByteLevel", "Metaspace", "Digits", "UnicodeScripts"))
_SPLITS = frozenset(("Split", "Punctuation"))  # keep all text, unless their behavior is "Removed"

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how a vocabulary with byte fallback spells a byte
_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that ByteLevel spells by the same character
_HIDDEN = (byte for byte in range(256) if byte not in _SHOWN)  # spelled by the characters from 256 on
_BYTE_BY_CHARACTER = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
_CHARACTER_BY_BYTE = {byte: character for character, byte in _BYTE_BY_CHARACTER.items()}

Part = dict[str, object]


def bytes_of(spelling: str) -> bytes | None:
    """Return the bytes for which a token's spelling in a vocabulary stands; None if it is not spelled by bytes."""
    if (byte := _BYTE.fullmatch(spelling)) is not None:
        return bytes.fromhex(byte[1])
    if not all(character in _BYTE_BY_CHARACTER for character in spelling):
        return None
    return bytes(_BYTE_BY_CHARACTER[character] for character in spelling)


def spellings_of(byte: int) -> tuple[str, str]:
    """Return how vocabularies spell a byte: as a token of its own with byte fallback, as a character by ByteLevel."""
    return f"<0x{byte:02X}>", _CHARACTER_BY_BYTE[byte]


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Return an upper bound of the UTF-8 bytes of text that one token can represent; None if none is certain."""
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    shrink = _shrink(parts_of(backend.normalizer, "normalizers"))
    splits = list(parts_of(backend.pre_tokenizer, "pretokenizers"))
    if shrink is None or not all(map(_keeps_all, splits)) or not isinstance(backend.model, BPE):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if backend.model.byte_fallback:
        knows_all = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    else:
        parts = [*splits, *parts_of(backend.normalizer, "normalizers")]
        is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        knows_all = is_byte_level and all(each in vocabulary for each in tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return shrink * max(len(token.encode()) for token in vocabulary) if knows_all else None


def parts_of(part: Normalizer | PreTokenizer | None, name: str) -> Iterator[Part]:
    """Yield the description of each part of a normalizer or pre-tokenizer, with Sequences flattened."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), name)


def _flat(part: Part, name: str) -> Iterator[Part]:
    inner = part.get(name)
    if part["type"] == "Sequence" and isinstance(inner, list):
        for each in inner:
            yield from _flat(each, name)
    else:
        yield part


def _shrink(normalizers: Iterator[Part]) -> int | None:
    """Return the largest factor by which the normalizers shrink a text's UTF-8 bytes; None if there is no limit."""
    factor = 1
    for part in normalizers:
        pattern = part.get("pattern")
        if part["type"] == "Replace" and isinstance(pattern, dict):
            old, new = pattern.get("String"), part.get("content")
            if not (isinstance(old, str) and isinstance(new, str) and len(new.encode()) >= len(old.encode())):
                return None
        elif (each := _SHRINK.get(str(part["type"]))) is not None:
            factor *= each
        else:
            return None
    return factor


def _keeps_all(part: Part) -> bool:
    if part["type"] in _SPLITS:
        return part.get("behavior") != "Removed"
    return part["type"] in _KEEPS_ALL
