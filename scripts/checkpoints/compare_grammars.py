"""Compare the libraries that make grammar masks: time to compile a schema, time of one token's mask.

    python scripts/checkpoints/compare_grammars.py TOKENIZER.json

Needs tokenizers and numpy, and each library to be measured: llguidance, xgrammar (which brings torch). Each schema is
compiled ROUNDS times without the library's cache; masks are timed along random walks of up to WALK tokens, which end
with the grammar. One thread. Runs without tokenloom, in any environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROUNDS = 3
WALK = 200

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, object] = {
    "person": _PERSON,
    "any object": {"type": "object"},
    "50 people": {"type": "array", "items": _PERSON, "minItems": 50},
    "bounded text": {"type": "string", "maxLength": 2000},
    "100 fields": {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(100)}},
    "enum of 2000": {"enum": [f"value {i * 7919}" for i in range(2000)]},
}

Words = npt.NDArray[np.uint32]


class Walker(NamedTuple):
    """One compiled grammar in use."""

    fill: Callable[[Words], object]
    accept: Callable[[int], bool]  # takes a token; returns False at the end


Compiler = Callable[[str], Walker]


def llguidance_compiler(path: Path) -> Compiler:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(path.read_text(encoding="utf-8"))

    def compile_schema(schema: str) -> Walker:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
        assert not matcher.is_error(), matcher.get_error()
        return Walker(
            lambda words: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes),
            lambda token_id: bool(matcher.consume_token(token_id)) and not matcher.is_stopped(),
        )

    return compile_schema


def xgrammar_compiler(path: Path) -> Compiler:
    import torch  # type: ignore[import-not-found,unused-ignore]
    import xgrammar  # type: ignore[import-not-found,unused-ignore]
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[1])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: str) -> Walker:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
        return Walker(
            lambda words: matcher.fill_next_token_bitmask(torch.from_numpy(words.view(np.int32))[None]),
            lambda token_id: bool(matcher.accept_token(token_id)) and not matcher.is_terminated(),
        )

    return compile_schema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER.json")
    path = parser.parse_args().tokenizer
    vocab_size = len(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])
    print(f"vocabulary {vocab_size}\n\n| library | schema | compile ms | mask µs median | p99 | max |")
    print("|---|---|--:|--:|--:|--:|")
    makers = {"llguidance": llguidance_compiler, "xgrammar": xgrammar_compiler}
    for name, make in makers.items():
        if importlib.util.find_spec(name) is None:
            continue
        compile_schema = make(path)
        for label, schema in SCHEMAS.items():
            compile_s, mask_s = _measure(compile_schema, json.dumps(schema), vocab_size)
            mask_us = [1e6 * each for each in sorted(mask_s)]
            p99 = mask_us[int(0.99 * (len(mask_us) - 1))]
            median = statistics.median(mask_us)
            print(f"| {name} | {label} | {1e3 * compile_s:.1f} | {median:.0f} | {p99:.0f} | {mask_us[-1]:.0f} |")


def _measure(compile_schema: Compiler, schema: str, vocab_size: int) -> tuple[float, list[float]]:
    """Return the median seconds to compile, and the seconds of each mask."""
    compile_s, mask_s = [], []
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    draw = random.Random(0)
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        walker = compile_schema(schema)
        compile_s.append(time.perf_counter() - begun)
        for _ in range(WALK):
            begun = time.perf_counter()
            walker.fill(words)
            mask_s.append(time.perf_counter() - begun)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if len(allowed) == 0 or not walker.accept(int(draw.choice(allowed.tolist()))):
                break
    return statistics.median(compile_s), mask_s


if __name__ == "__main__":
    main()
