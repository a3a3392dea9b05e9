"""/v1/embed and /v2/embed: their forms, compared with /v1/embeddings' floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tokenloom.ipc.spec.models.pooling.pooling_config import PoolingConfig
from tokenloom.ipc.spec.models.pooling.sentence_files import with_sentence_files
from tokenloom.tests.system.http_engine import ask

TEXTS = ["The capital of France is", "The capital of Peru is", "one two three"]
LONG = " ".join(f"alpha{i}" for i in range(900)) + " " + " ".join(f"omega{i}" for i in range(900))


def embed(http: httpx2.Client, path: str = "/v2/embed", **body: object) -> Any:
    return ask(http, path, body)


def floats(http: httpx2.Client, **body: object) -> np.ndarray[Any, Any]:
    return np.array([each["embedding"] for each in ask(http, "/v1/embeddings", body)["data"]])


def test_each_api_version_has_its_response_format(http: httpx2.Client) -> None:
    second = embed(http, texts=TEXTS, input_type="search_query", request_id="mine")
    assert second["texts"] == TEXTS and second["response_type"] == "embeddings_by_type" and second["id"] == "embd-mine"
    num_tokens = sum(http.post("/tokenize", json={"prompt": text}).json()["count"] for text in TEXTS)
    units = {"input_tokens": num_tokens, "image_tokens": 0}
    tokens = {"input_tokens": num_tokens, "output_tokens": 0}
    assert second["meta"] == {"api_version": {"version": "2"}, "billed_units": units, "tokens": tokens}
    first = embed(http, "/v1/embed", texts=TEXTS)
    assert first["response_type"] == "embeddings_floats" and first["meta"]["api_version"] == {"version": "1"}
    np.testing.assert_allclose(first["embeddings"], second["embeddings"]["float"], atol=1e-4)
    typed = embed(http, "/v1/embed", texts=TEXTS, embedding_types=["float"])
    assert typed["response_type"] == "embeddings_by_type" and list(typed["embeddings"]) == ["float"]


@pytest.mark.parametrize(("truncate", "side"), [("START", "left"), ("END", "right"), (None, "right")])
@pytest.mark.parametrize("max_tokens", [None, 9])
def test_a_long_text_is_truncated_at_the_requested_side(
    http: httpx2.Client, truncate: str | None, side: str, max_tokens: int | None
) -> None:
    answer = embed(http, texts=[LONG], truncate=truncate, max_tokens=max_tokens)
    cut = {"truncate_prompt_tokens": max_tokens or -1, "truncation_side": side}
    np.testing.assert_allclose(answer["embeddings"]["float"], floats(http, input=LONG, **cut), atol=1e-4)
    assert answer["meta"]["billed_units"]["input_tokens"] == (max_tokens or 2048)


def test_an_input_type_prepends_the_checkpoints_prompt_to_each_text(door: httpx2.Client) -> None:
    found = {kind: embed(door, texts=TEXTS, input_type=kind) for kind in ("query", "document", None)}
    for kind, prefix in (("query", "Find: "), ("document", ""), (None, "")):
        assert found[kind]["texts"] == TEXTS
        expected = floats(door, input=[prefix + text for text in TEXTS])
        np.testing.assert_allclose(found[kind]["embeddings"]["float"], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("file", "field"), [("config.json", "task_instructions"), ("config_sentence_transformers.json", "prompts")]
)
def test_a_checkpoints_prompts_are_read_from_either_file(tmp_path: Path, file: str, field: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps({field: {"query": "Find: ", "other": 7}}))
    assert with_sentence_files(PoolingConfig(), tmp_path, 8).prompts == {"query": "Find: "}
