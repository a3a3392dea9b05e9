"""Grammars of the library with the demo's vocabulary, and the texts that conform to them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tokenloom.core.features.grammar.compiler import GrammarCompiler, Matcher, Words

DEMO = Path(__file__).resolve().parents[4] / "demo"
VOCAB_SIZE, EOS, MAX_STEPS = 2048, 1, 300
TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
COMPILER = GrammarCompiler(DEMO, VOCAB_SIZE, [EOS])
Schema = dict[str, Any]


def ids_of(words: Words) -> list[int]:
    """Return the tokens that a mask allows."""
    ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return ids


def allowed(matcher: Matcher) -> list[int]:
    """Return the tokens that may come next."""
    words = np.zeros(COMPILER.num_words, np.uint32)
    matcher.fill(words)
    return ids_of(words)


def accepts_text(schema: Schema, text: str, kind: Any = "json") -> bool:
    """Whether a text conforms to the grammar of `schema`."""
    matcher = COMPILER.compile(kind, json.dumps(schema))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        matcher.consume([token_id])
        if matcher.error is not None:
            return False
    return bool(matcher.inner.is_accepting())


def accepts(schema: Schema, value: object) -> bool:
    """Whether a value's text, written as the library itself would, conforms to the grammar of `schema`."""
    return accepts_text(schema, json.dumps(value, ensure_ascii=False))


def random_text(schema: Schema, seed: int, end_chance: float = 0.5) -> str:
    """Return a random text of the grammar; "" if it has no end in sight. `end_chance`: to end it where that may be."""
    matcher, draw, taken = COMPILER.compile("json", json.dumps(schema)), random.Random(seed), list[int]()
    while not matcher.is_complete and len(taken) < MAX_STEPS:
        found = allowed(matcher)
        assert matcher.error is None, matcher.error
        if EOS in found and (len(found) == 1 or draw.random() < end_chance):
            break
        taken.append(draw.choice([each for each in found if each != EOS]))
        matcher.consume(taken[-1:])
    return TOKENIZER.decode(taken, skip_special_tokens=True) if matcher.inner.is_accepting() else ""


def answer(schema: Schema, seed: int) -> object:
    """Return a random value of the grammar, of a text that ends as soon as it may; None without an end in sight."""
    try:
        return json.loads(random_text(schema, seed, end_chance=1.0))
    except ValueError:
        return None


def record(**properties: object) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}
