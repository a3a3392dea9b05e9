"""Malformed and truncated bodies never get a 500."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import msgspec
import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.openai.embedding_body import EmbeddingRequest, GenerativeScoringRequest
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest
from tokenloom.frontend.forms.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest
from tokenloom.frontend.forms.pooling.pooling_body import PoolingRequest, ScoreRequest
from tokenloom.frontend.forms.pooling.rerank_body import RerankRequest
from tokenloom.frontend.forms.pooling.tei_body import TeiEmbedRequest
from tokenloom.tests.system.http_engine import QUESTION

VALUES = [None, True, 0, -1, 1, 3, 1e308, -0.5, "", "x", "\x00", [], [[]], [1], ["a"], {}, {"a": 1}, 2**63, "😀" * 9]
BODIES = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    EmbeddingRequest,
    GenerativeScoringRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    DetokenizeRequest,
    MessagesRequest,
)
FIELDS = sorted({field.name for body in BODIES for field in msgspec.structs.fields(body)})
GOOD_BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "The", "max_tokens": 2},
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 2},
    "/v1/responses": {"input": "The", "max_output_tokens": 2},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/v1/embeddings": {"input": "The"},
    "/pooling": {"input": "The"},
    "/score": {"text_1": "The", "text_2": ["x"]},
    "/rerank": {"query": "The", "documents": ["x", "y"]},
    "/embed": {"inputs": "The"},
    "/generative_scoring": {"query": "The", "items": ["x", [5]], "label_token_ids": [5, 6]},
    "/tokenize": {"prompt": "The"},
    "/detokenize": {"tokens": [5]},
    "/abort": {"request_id": "none"},
}


def fuzzed_body(rng: random.Random, path: str) -> bytes:
    body = dict(GOOD_BODIES[path])
    for _ in range(rng.randrange(3)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.1:
        body["messages"] = [{"role": rng.choice(["user", "system", "tool", ""]), "content": rng.choice(VALUES)}]
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        place = rng.randrange(len(raw))
        raw = raw[:place] + rng.randbytes(rng.randrange(4)) + raw[place + rng.randrange(3) :]
    return raw


def fuzz(http: httpx2.Client, count: int, seed: int) -> Counter[int]:
    """Return the number of answers by status."""
    rng, statuses = random.Random(seed), Counter[int]()
    bodies = [(path, fuzzed_body(rng, path)) for path in rng.choices(list(GOOD_BODIES), k=count)]
    with ThreadPoolExecutor(20) as pool:
        for body, answer in zip(
            bodies, pool.map(lambda each: http.post(each[0], content=each[1]), bodies), strict=True
        ):
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (body, answer.text)
    return statuses


def test_no_body_gets_a_500(http: httpx2.Client) -> None:
    statuses = fuzz(http, 250, seed=1)
    assert statuses[200] > 10 and statuses[400] > 50
    assert http.get("/ready").status_code == 200


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_body_of_a_hundred_thousand_gets_a_500(http: httpx2.Client) -> None:
    fuzz(http, 100_000, seed=2)
    assert http.get("/ready").status_code == 200
