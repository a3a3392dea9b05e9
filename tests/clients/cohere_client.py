"""Cohere's own client against the engine's URL: both versions of its API, every type, truncation, a refusal, rerank."""

from __future__ import annotations

import json
import sys

import cohere

TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
TEXTS = [f"text {i}" for i in range(200)]  # the client of version 1 sends them in three requests


def reranked(client: cohere.Client | cohere.ClientV2) -> list[object]:
    """Rank documents of which one is the query; return the places of the first two, and whether their scores fall."""
    found = client.rerank(model="tokenloom-demo", query=TEXTS[7], documents=TEXTS[:10], top_n=2)
    first, second = found.results
    return [first.index, len(found.results), first.relevance_score > second.relevance_score]


def main(url: str) -> None:
    seen: dict[str, object] = {}
    second = cohere.ClientV2(api_key="none", base_url=url)
    found = second.embed(model="tokenloom-demo", input_type="search_query", texts=["Lima"], embedding_types=TYPES)
    rows = found.embeddings.model_dump(by_alias=True)
    seen["types"] = {
        name: len(rows["float_" if name == "float" and "float" not in rows else name][0]) for name in TYPES
    }
    assert found.meta is not None and found.meta.billed_units is not None
    seen["meta"] = [found.meta.api_version.version, found.meta.billed_units.input_tokens, found.texts]
    long = second.embed(
        model="tokenloom-demo", input_type="search_document", texts=["word " * 9000], embedding_types=["float"],
        truncate="START", output_dimension=8,
    )  # fmt: skip
    seen["cut"] = [long.meta.billed_units.input_tokens, len(long.embeddings.float_[0])]
    try:
        second.embed(model="tokenloom-demo", input_type="other", texts=["Lima"], embedding_types=["float"])
    except cohere.BadRequestError as error:
        seen["refused"] = error.body["error"]["param"]
    first = cohere.Client(api_key="none", base_url=url).embed(texts=TEXTS, model="tokenloom-demo")
    seen["first"] = [first.response_type, len(first.embeddings), first.texts == TEXTS]
    seen["reranked"] = [reranked(client) for client in (second, cohere.Client(api_key="none", base_url=url))]
    print(json.dumps(seen))


main(sys.argv[1])
