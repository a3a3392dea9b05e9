"""/v1/embeddings over a running engine: the official client, all encodings, lists."""

from __future__ import annotations

import base64
import json
import math
import struct

import httpx2
import openai
import pytest
import torch

from tokenloom.tests.system.http_engine import QUESTION, ask

TEXTS = ["The capital of France is", "The capital of Peru is", "one two three"]


def embed(http: httpx2.Client, **body: object) -> list[list[float]]:
    return [each["embedding"] for each in ask(http, "/v1/embeddings", body)["data"]]


def test_the_openai_client_gets_a_vector_for_each_text_and_its_usage(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    answer = client.embeddings.create(model="tokenloom-demo", input=TEXTS)  # the client requests base64 and decodes it
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert answer.model == "tokenloom-demo"
    num_tokens = [http.post("/tokenize", json={"prompt": text}).json()["count"] for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(num_tokens)
    for text, each in zip(TEXTS, answer.data, strict=True):
        assert sum(x * x for x in each.embedding) == pytest.approx(1, abs=1e-5)
        assert each.embedding == pytest.approx(embed(http, input=text)[0], abs=1e-4)


def test_token_ids_and_their_text_get_equal_vectors_in_each_encoding(http: httpx2.Client) -> None:
    ids = [ask(http, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    expected = embed(http, input=TEXTS, pooling="mean", use_activation=False)
    for form in (ids, [TEXTS[0], *ids[1:]]):
        for vector, known in zip(embed(http, input=form, pooling="mean", normalize=False), expected, strict=True):
            assert vector == pytest.approx(known, abs=1e-4)
    (packed,) = embed(http, input=ids[0], pooling="mean", normalize=False, encoding_format="base64")
    assert struct.unpack("<256f", base64.b64decode(str(packed))) == pytest.approx(expected[0], abs=1e-4)
    (cut,), length = embed(http, input=ids[0], pooling="mean", dimensions=8), math.hypot(*expected[0][:8])
    assert cut == pytest.approx([x / length for x in expected[0][:8]], abs=1e-4)


def test_similarities_are_the_cosines_of_the_vectors(http: httpx2.Client, door: httpx2.Client) -> None:
    compared = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    source, *others = embed(http, input=TEXTS)
    expected = [sum(a * b for a, b in zip(source, each, strict=True)) for each in others]
    assert ask(http, "/similarity", inputs=compared, parameters={}) == pytest.approx(expected, abs=1e-4)
    long = {"source_sentence": TEXTS[0], "sentences": ["long " * 3000]}
    assert http.post("/similarity", json={"inputs": long}).status_code == 400
    cut = {"truncate": True, "truncation_direction": "Left"}
    assert len(ask(http, "/similarity", inputs=long, parameters=cut)) == 1
    named = ask(door, "/similarity", inputs=compared, parameters={"prompt_name": "query"})
    source, *others = embed(door, input=["Find: " + text for text in TEXTS])
    assert named == pytest.approx([sum(map(float.__mul__, source, each)) for each in others], abs=1e-4)
    for wrong in ({"source_sentence": "a", "sentences": []}, {"source_sentence": "a"}, ["a"], "a"):
        assert http.post("/similarity", json={"inputs": wrong}).status_code == 400


def test_a_chat_is_embedded_as_its_rendered_prompt(http: httpx2.Client) -> None:
    for more in ({}, {"add_generation_prompt": True}, {"add_special_tokens": True}):
        chat = {"add_generation_prompt": False, "messages": QUESTION} | more
        asked = {key: value for key, value in chat.items() if key != "add_special_tokens"}
        ids = http.post("/tokenize", json=asked | {"add_special_tokens": bool(more.get("add_special_tokens"))}).json()
        (vector,) = embed(http, messages=QUESTION, **more)
        assert vector == pytest.approx(embed(http, input=ids["tokens"])[0], abs=1e-4)


TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


@pytest.mark.parametrize(("dtype", "endianness"), [("float16", "native"), ("bfloat16", "big"), ("fp8_e4m3", "little")])
def test_vectors_are_packed_in_the_requested_dtype_and_endianness(
    http: httpx2.Client, dtype: str, endianness: str
) -> None:
    body = {"input": TEXTS, "embed_dtype": dtype, "endianness": endianness, "cache_salt": dtype}
    floats = torch.tensor(embed(http, **body), dtype=torch.float32).to(TORCH_TYPES[dtype])
    codes = floats.view({2: torch.int16, 1: torch.int8}[floats.itemsize]).numpy()
    rows = [(row.byteswap() if endianness == "big" else row).tobytes() for row in codes]
    assert [base64.b64decode(str(each)) for each in embed(http, **body, encoding_format="base64")] == rows
    packed = http.post("/v1/embeddings", json=body | {"encoding_format": "bytes"})
    metadata = json.loads(packed.headers["metadata"])
    assert [packed.content[each["start"] : each["end"]] for each in metadata["data"]] == rows
    assert {(each["embed_dtype"], each["endianness"], *each["shape"]) for each in metadata["data"]} == {
        (dtype, endianness, 256)
    }
    assert metadata["usage"]["total_tokens"] > 0 and metadata["id"].startswith("embd-")
    bare = http.post("/v1/embeddings", json=body | {"encoding_format": "bytes_only"})
    assert bare.content == packed.content and "metadata" not in bare.headers


@pytest.mark.parametrize("truncation", [{}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 2048}])
def test_an_embedded_prompt_may_fill_max_model_len(http: httpx2.Client, truncation: dict[str, int]) -> None:
    answer = http.post("/v1/embeddings", json={"input": [5] * (2100 if truncation else 2048)} | truncation)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 2048, answer.text
