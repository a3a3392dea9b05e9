"""Random token sequences, their expected text, and the check that streams of them join to it.

The caller chooses their number: test_detokenizer.py beside this file 10⁴, scripts/chaos/fuzz_detokenizer.py 10⁶.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from tokenloom.frontend.server.text.detokenizer import Detokenizer, DetokenizerFactory, PieceDetokenizer
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.tests.frontend.server.text.samples import SENTENCES, new_tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> Iterator[str]:
    for token_id in token_ids:
        yield detokenizer.append(token_id)
    yield detokenizer.finish()


def random_ids(rng: random.Random, tokenizer: Tokenizer, count: int) -> list[int]:
    """Draw tokens of real text, random bytes, special tokens and unknown ids."""
    token_ids: list[int] = []
    while len(token_ids) < count:
        if rng.random() < 0.5:
            text = rng.choice(SENTENCES)
            begin = rng.randrange(len(text))
            token_ids += tokenizer.encode(text[begin : begin + 12], add_special_tokens=False)
        else:
            token_ids += [rng.randrange(tokenizer.size + 5) for _ in range(rng.randrange(1, 4))]
    return token_ids[:count]


def oracle(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Decode all tokens, byte tokens by ourselves: the library makes a whole run of them U+FFFD if one is invalid."""
    assert tokenizer.backend is not None
    kept = [token_id for token_id in token_ids if token_id not in tokenizer.special_ids and token_id < tokenizer.size]
    data, text = b"", ""
    for token_id in [*kept, -1]:
        token = "" if token_id < 0 else tokenizer.backend.id_to_token(token_id) or ""
        match = BYTE_TOKEN.fullmatch(token)
        if match:
            data += bytes([int(match[1], 16)])
            continue
        text += data.decode(errors="replace")
        data = b""
        text += token.replace("▁", " ")
    return text.removeprefix(" ")


def whole(kind: str, tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return oracle(tokenizer, token_ids) if kind == "byte_fallback" else tokenizer.decode(token_ids)


def check_sequences(kind: str, seed: int, count: int) -> None:
    """Assert that the deltas of `count` random answers join to the text of all their tokens. Half of them follow a
    prompt, no part of which may appear, not even its invalid characters."""
    rng, tokenizer = random.Random(seed), new_tokenizer(kind)
    factory = DetokenizerFactory(tokenizer)
    for number in range(count):
        prompt = tokenizer.encode(rng.choice(SENTENCES)) if number % 2 else []
        if number % 4 == 3:
            prompt = random_ids(rng, tokenizer, rng.randrange(1, 8)) + prompt
        token_ids = random_ids(rng, tokenizer, rng.randrange(1, 24))
        detokenizer = factory.new(prompt, True)
        assert isinstance(detokenizer, PieceDetokenizer)
        text = "".join(stream(detokenizer, token_ids))
        case = f"{kind}, seed {seed}, sequence {number}: {token_ids} after {prompt}"
        assert whole(kind, tokenizer, prompt) + text == whole(kind, tokenizer, prompt + token_ids), case
