"""Write a tokenizer.json with a vocabulary of any size, for measurements in which only the bytes of the tokens count.

Its tokens are all bytes, the most frequent words and signs of the Python library's sources, and pairs of Chinese
characters up to the size. It has no merges: `encode` takes the longest token at each place.
"""

from __future__ import annotations

import itertools
import json
import re
import sysconfig
from collections import Counter
from pathlib import Path

MAX_FILES = 2000
MAX_TOKEN = 16  # characters
END = "<|end|>"  # the first token
_TOKEN = re.compile(r" ?[A-Za-z_]+|\d{1,3}| ?[^\sA-Za-z_\d]{1,4}|\s+")


def write_vocabulary(folder: Path, size: int) -> dict[str, int]:
    """Write folder/tokenizer.json and return the ids of its `size` tokens by their texts."""
    counts = Counter[str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:MAX_FILES]:
        counts.update(_TOKEN.findall(path.read_text(encoding="utf-8", errors="ignore")))
    words = (word[:end] for word, _ in counts.most_common() for end in range(2, min(len(word), MAX_TOKEN) + 1))
    pairs = map("".join, itertools.product(map(chr, range(0x4E00, 0x5200)), repeat=2))
    letters = _letters()
    texts = [END, *map(chr, range(128)), *itertools.islice(dict.fromkeys(itertools.chain(words, pairs)), size - 257)]
    written = [END, *letters.values()]
    written += ["".join(letters[byte] for byte in text.encode()) for text in texts[129:]]
    model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(written)}, "merges": []}
    described = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": END, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    return {text: number + 128 * (number > 128) for number, text in enumerate(texts)}


def encode(text: str, ids: dict[str, int]) -> list[tuple[int, int]]:
    """Return the tokens of a text in ASCII, each with its place in the text."""
    found: list[tuple[int, int]] = []
    place = 0
    while place < len(text):
        pieces = (text[place : place + length] for length in range(MAX_TOKEN, 0, -1))
        piece = next(each for each in pieces if each in ids)
        found.append((place, ids[piece]))
        place += len(piece)
    return found


def _letters() -> dict[int, str]:
    """Return the letter that stands for each byte in tokens of byte-level BPE."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = itertools.count(256)
    return {byte: chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)}
