"""Small vocabularies in GGUF files, and the ids that llama.cpp gives with them.

Run by a Python with llama-cpp-python and gguf, it records them again, for frontend/gguf/test_tokenizer.py:

    python tests/frontend/checkpoint/gguf/gguf_vocabulary.py tests/frontend/checkpoint/gguf/tokens_of_llama_cpp.json

The merges are learned from TEXTS as a whole, after those of words: without a splitting each text would be one token, so
every place at which a splitting cuts shows in the ids.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

TEXTS = (
    "Hello World, it's HelloWORLD'S camelCase; DON'T we'LL I'Ve '\u017f",
    "  two  spaces   three \t tab\t\ttabs    four\n\n\nlines \n \r\nend" + 17 * " " + "x  \n",
    "1 12 123 1234 12345678 3.14 1,234.50 x2y \u00bd \u00b2\u00b3 \u2167 \u0663\u0664\u0665\u0666 \u0967\u0968",
    "\u00c9cole \u00c9COLE na\u00efve \u01c5 \u02b0a \u00aab stra\u00dfe \u0391\u0392\u03b3\u03b4 \u0416\u0436",
    "e\u0301a\u0301's \u0928\u092e\u0938\u094d\u0924\u0947 \u0e20\u0e32\u0e29\u0e32 '\u0301ll",
    "\u65e5\u672c\u8a9e\u30ab\u30ca\u3002\u4e2d\u6587\uff0c\u5b57\uff01\ud55c\uad6d \u3001\u300cx\u2026\u201cq\u2019",
    "if (a==b) { return x->y; } // $z += ~v ^ w | `q`\n\tx_1 = y\\z/w//\n",
    '...!!!?? --- ===\n\n#@%&*!\r\n<a href="b">/</a>\n/path/to, so',
    "\U0001f389\U0001f44d\U0001f3fd \u200b\u00a0\u2003x\u0085y \ufeff",
    "\u00a3\uff01\uff1a \u00a3\u2018 <sentinel:12> IMGIMGABCZ (x).y",
    "aB CamelCase\u00c9 fooBar BARfoo x'sHello n'tX \u4e2d'll",
    "ab\u4e2d\u6587cd\u30abef \u4e2d\u56fdx",
    "a  12   345\n\n 6789, 12345  67\u0967\u0968\u0969\u096a 1\u4e2d2 \u4e2d\u65871234",
    "\u10d0 \u1c90 \u0587 \ua7c0 a\u10d0",
)
UNLEARNED = (
    " ignored ignored\nignored",
    "a<|im_end|>b <tool>c<\uff5cUser\uff5c> d<|begin|>[PAD0] e",
    "\u2581 \u0001 \u6f22  \u2581x  <tool>  y <unk>z",
)
RECORDED = (*TEXTS, *UNLEARNED)
_ONE_OF_EACH_SPLITTING = (
    "default llama-bpe dbrx glm4 minicpm5 jais-2 qwen2 qwen35 laguna ufakzeka bailingmoe seed-coder exaone-moe gpt-2 "
    "starcoder falcon chameleon gpt-4o granite-embed-multi-97m tiny_aya tekken youtu kimi-k2 superbpe deepseek-llm "
    "deepseek-coder deepseek-v3 spark2_5 bloom viking"
)
PRES = _ONE_OF_EACH_SPLITTING.split()
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def characters_of_bytes() -> dict[int, str]:
    """Return GPT-2's spelling of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


@cache
def merges_of(*texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Merge the most frequent pairs of neighbours until every run is one piece, and then until every text is one. A
    text is given as its runs."""
    merges: list[tuple[str, str]] = []
    runs = _merged([list(run) for text in texts for run in text], merges)
    pieces = iter(piece for (piece,) in runs)
    _merged([[next(pieces) for _ in text] for text in texts], merges)
    return merges


def _merged(sequences: list[list[str]], merges: list[tuple[str, str]]) -> list[list[str]]:
    """Return the sequences with one piece each, and add the merges."""
    while counts := Counter(pair for each in sequences for pair in pairwise(each)):
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append((left, right))
        for i, sequence in enumerate(sequences):
            joined: list[str] = []
            for piece in sequence:
                if piece == right and joined and joined[-1] == left:
                    joined[-1] = left + right
                else:
                    joined.append(piece)
            sequences[i] = joined
    return sequences


def runs_of(text: str) -> list[str]:
    """Cut a text into runs of characters of one kind."""
    return re.findall(r"'\w+|\d+|[^\W\d]+|\s+|[^\w\s']+|'", text)


def write_byte_level(file: Path, pre: str | None, **changed: Any) -> Path:
    """Write a vocabulary of kind gpt2; `changed`: other metadata behind `tokenizer.ggml.`, None: without."""
    spelled = characters_of_bytes()
    merges = merges_of(
        *(tuple("".join(spelled[byte] for byte in run.encode()) for run in runs_of(text)) for text in TEXTS)
    )
    tokens = {"<|begin|>": CONTROL, "[PAD0]": UNUSED} | dict.fromkeys(spelled.values(), NORMAL)
    tokens |= dict.fromkeys(map("".join, merges), NORMAL)
    tokens |= {"\u0120ignored": NORMAL, "<|im_end|>": NORMAL, "<tool>": USER_DEFINED, "<\uff5cUser\uff5c>": CONTROL}
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": list(tokens),
        "token_type": list(tokens.values()),
        "merges": list(map(" ".join, merges)),
        "bos_token_id": 0,
        "eos_token_id": len(tokens) - 1,
    }
    return write_vocabulary(file, fields | changed)


def write_sentencepiece(file: Path, space: str = "\u2581", **changed: Any) -> Path:
    """Write a vocabulary of kind llama, as `write_byte_level`. Some characters are not in it. `space`: how runs of
    spaces are spelled, which are tokens as in Gemma."""
    texts = [runs_of("\u2581" + text.replace(" ", "\u2581")) for text in TEXTS[:4] + TEXTS[6:8]]
    merges = merges_of(*map(tuple, texts))
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<tool>": USER_DEFINED}
    tokens |= {2 * space: USER_DEFINED, 3 * space: USER_DEFINED, "\n\n": USER_DEFINED}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    whole = ("\u2581\u2581", "\n\n")  # SentencePiece learns no pieces with a part that the user has defined
    pieces = [each for each in dict.fromkeys(map("".join, merges)) if not any(part in each for part in whole)]
    pieces += [each for each in dict.fromkeys("".join(map("".join, texts))) if each not in pieces]
    scores = [0.0] * len(tokens) + [-1.0 - i for i in range(len(pieces))]
    tokens |= dict.fromkeys(pieces, NORMAL)
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": list(tokens),
        "token_type": list(tokens.values()),
        "scores": scores,
    }
    return write_vocabulary(file, fields | changed)


def write_gemma4(file: Path, **changed: Any) -> Path:
    """Write a vocabulary of kind gemma4, as `write_byte_level`, made of characters. No merge gives the token of three
    newlines."""
    texts = [runs_of(text.replace(" ", "\u2581")) for text in TEXTS[:4] + TEXTS[6:8]]
    merges = merges_of(*map(tuple, texts))
    tokens = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN, "<tool>": USER_DEFINED}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    pieces = {*"".join(map("".join, texts)), *map("".join, merges)}
    merges = [pair for pair in merges if "".join(pair) != "\n\n\n"]
    tokens |= dict.fromkeys(sorted(pieces), NORMAL)
    fields = {
        "model": "gemma4",
        "tokens": list(tokens),
        "token_type": list(tokens.values()),
        "scores": [0.0] * len(tokens),
        "merges": list(map(" ".join, merges)),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }
    return write_vocabulary(file, fields | changed)


def write_vocabulary(file: Path, fields: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    writer.add_name(fields.pop("name", "tiny"))
    for name, value in fields.items():
        if value is not None:
            adders[type(value)](f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


VOCABULARIES = {pre: (write_byte_level, {"pre": pre}) for pre in PRES} | {
    "without pre": (write_byte_level, {"pre": None}),
    "without BOS": (write_byte_level, {"pre": "llama-bpe", "add_bos_token": False}),
    "with BOS and EOS": (write_byte_level, {"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}),
    "gemma4": (write_gemma4, {}),
    "llama": (write_sentencepiece, {}),
    "llama without space": (write_sentencepiece, {"add_space_prefix": False}),
    "llama with spaces": (write_sentencepiece, {"add_space_prefix": False, "space": " "}),
    "llama with EOS": (write_sentencepiece, {"add_bos_token": False, "add_eos_token": True}),
}


def write_named(name: str, folder: Path) -> Path:
    """Write one of VOCABULARIES into `folder`."""
    write, changed = VOCABULARIES[name]
    return write(folder / f"{name}.gguf", **changed)


def record(to: Path) -> None:
    import llama_cpp

    found: dict[str, Any] = {"llama_cpp_python": llama_cpp.__version__, "ids": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in VOCABULARIES:
            model = llama_cpp.Llama(str(write_named(name, Path(folder))), vocab_only=True, verbose=False)
            found["ids"][name] = [model.tokenize(text.encode(), add_bos=True, special=True) for text in RECORDED]
    lines = (f"  {json.dumps(name)}: {json.dumps(ids)}" for name, ids in found.pop("ids").items())
    to.write_text(f'{json.dumps(found)[:-1]}, "ids": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
