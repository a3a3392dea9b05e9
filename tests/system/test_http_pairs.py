"""/score, /rerank, /classify, /pooling and TEI's endpoints over a running engine with a classification head."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import torch

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.headed_checkpoints import Headed, headed_checkpoint
from tokenloom.tests.system.http_engine import ask, samples

TEXTS = ["Oslo lies at a fjord.", "A brick is red.", "no"]
QUERY = "Which city lies at a fjord?"
LABELS = {"0": "bad", "1": "fair", "2": "good"}
TOLERANCE = 1e-5


def served(made: Headed) -> Iterator[httpx2.Client]:
    numbers = ["--num-threads", "1", "--http", "0", "--dtype", "float32", "--max-model-len", "256"]
    runtime = made.folder / "run"
    runtime.mkdir()
    with Engine(runtime, ["--device", "cpu", "--model", str(made.folder), *numbers]) as engine:
        engine.wait_ready()
        with httpx2.Client(base_url=engine.url, timeout=60) as http:
            yield http


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    folder = tmp_path_factory.mktemp("classifier")
    return headed_checkpoint(folder, "llama", "sequence", 3, vocab_size=512, id2label=LABELS)


@pytest.fixture(scope="module")
def http(classifier: Headed) -> Iterator[httpx2.Client]:
    yield from served(classifier)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return headed_checkpoint(tmp_path_factory.mktemp("reranker"), "qwen3", "sequence", 1, vocab_size=512)


@pytest.fixture(scope="module")
def ranks(reranker: Headed) -> Iterator[httpx2.Client]:
    yield from served(reranker)


def ids(http: httpx2.Client, text: str) -> list[int]:
    found: list[int] = ask(http, "/tokenize", prompt=text)["tokens"]
    return found


def pair_score(made: Headed, http: httpx2.Client, first: str, second: str) -> float:
    bare = ask(http, "/tokenize", prompt=second, add_special_tokens=False)["tokens"]
    return float(made.logits(ids(http, first) + bare)[0].sigmoid())


def test_classes_have_their_labels_and_transformers_probabilities(http: httpx2.Client, classifier: Headed) -> None:
    answer = ask(http, "/classify", input=TEXTS)
    expected = [classifier.logits(ids(http, text)).softmax(-1) for text in TEXTS]
    for entry, probs in zip(answer["data"], expected, strict=True):
        assert entry["probs"] == pytest.approx(probs.tolist(), abs=TOLERANCE) and entry["num_classes"] == 3
        assert entry["label"] == LABELS[str(int(probs.argmax()))]
    assert answer["usage"]["total_tokens"] == sum(len(ids(http, text)) for text in TEXTS)
    assert answer["id"].startswith("classify-") and answer["object"] == "list"
    predicted = ask(http, "/predict", inputs=[[text] for text in TEXTS])
    for entries, probs in zip(predicted, expected, strict=True):
        assert [each["score"] for each in entries] == pytest.approx(sorted(probs.tolist(), reverse=True), abs=TOLERANCE)
    assert ask(http, "/predict", inputs=TEXTS[0], raw_scores=True)[0]["score"] == pytest.approx(
        float(classifier.logits(ids(http, TEXTS[0])).max()), abs=TOLERANCE
    )


def test_clients_of_sagemaker_and_of_the_hub_reach_the_models_own_task_at_one_path(
    http: httpx2.Client, ranks: httpx2.Client
) -> None:
    text, pairs = {"input": TEXTS[0]}, {"query": QUERY, "documents": TEXTS}
    hub = {"inputs": TEXTS[0], "parameters": {"top_k": 2}}  # huggingface_hub's InferenceClient.text_classification
    for path in ("/invocations", "/"):
        (found,), (expected,) = (ask(http, at, text)["data"] for at in (path, "/classify"))
        assert found["probs"] == pytest.approx(expected["probs"], abs=TOLERANCE)
        assert ask(http, path, messages=[{"role": "user", "content": "no"}])["data"][0]["num_classes"] == 3
        assert [each["label"] for each in ask(http, path, hub)] == [
            each["label"] for each in ask(http, "/predict", hub)
        ]
        assert [each["document"]["text"] for each in ask(ranks, path, pairs)["results"]] == [
            TEXTS[each["index"]] for each in ask(ranks, "/rerank", pairs)["results"]
        ]
        llama_index = {"query": QUERY, "texts": TEXTS}
        assert [set(each) for each in ask(ranks, path, llama_index)] == [{"index", "score"}] * 3
        for first, second in (("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")):
            scored = {first: QUERY, second: TEXTS}
            found, expected = ([each["score"] for each in ask(ranks, at, scored)["data"]] for at in (path, "/score"))
            assert found == pytest.approx(expected, abs=TOLERANCE)
    for client in (http, ranks):
        answer = client.post("/similarity", json={"inputs": {"source_sentence": "a", "sentences": ["b"]}})
        assert answer.status_code == 400 and "has no embedding" in answer.json()["error"]["message"]


def test_a_task_by_tokens_has_a_row_for_each_token(http: httpx2.Client, classifier: Headed) -> None:
    tokens = ids(http, TEXTS[0])
    (entry,) = ask(http, "/pooling", input=tokens, task="token_classify", use_activation=False)["data"]
    expected = torch.stack([classifier.logits(tokens[: end + 1]) for end in range(len(tokens))])
    assert torch.tensor(entry["data"]).sub(expected).abs().max() <= TOLERANCE


def test_the_model_says_which_tasks_it_serves(http: httpx2.Client) -> None:
    for path, body, said in (
        ("/v1/embeddings", {"input": "x"}, "task is embed, but this model"),
        ("/v1/completions", {"prompt": "x"}, "generates no tokens"),
        ("/score", {"text_1": "x", "text_2": "y"}, "scores no pairs"),
        ("/pooling", {"input": "x", "task": "score"}, "it serves classify, token_classify"),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], path
    assert "/classify" in http.get("/openapi.json").json()["paths"]
    assert "/score" not in http.get("/openapi.json").json()["paths"]


def test_scores_of_pairs_are_transformers_in_any_of_their_names(ranks: httpx2.Client, reranker: Headed) -> None:
    expected = [pair_score(reranker, ranks, QUERY, text) for text in TEXTS]
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        for path in ("/score", "/v1/score"):
            answer = ask(ranks, path, {first: QUERY, second: TEXTS})
            assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)
    crossed = ask(ranks, "/score", text_1=[QUERY, QUERY, QUERY], text_2=TEXTS)
    assert [each["score"] for each in crossed["data"]] == pytest.approx(expected, abs=TOLERANCE)
    for body, said in (
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 texts and text_2 3"),
        ({"text_1": "a", "documents": ["b"]}, "give one pair of"),
    ):
        answer = ranks.post("/score", json=body)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_pooled_prompts_are_counted_by_task(ranks: httpx2.Client) -> None:
    def counted() -> dict[str, float]:
        found = samples(ranks)
        return {
            name: found.get(f"tokenloom_{name}_total{{score}}", 0.0)
            for name in ("pooled_prompts", "pooled_prompt_tokens")
        }

    before = counted()
    answer = ask(ranks, "/score", text_1=QUERY, text_2=TEXTS)
    after = counted()
    assert after["pooled_prompts"] - before["pooled_prompts"] == 3
    assert after["pooled_prompt_tokens"] - before["pooled_prompt_tokens"] == answer["usage"]["total_tokens"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_by_falling_relevance(ranks: httpx2.Client, reranker: Headed, path: str) -> None:
    scores = [pair_score(reranker, ranks, QUERY, text) for text in TEXTS]
    order = sorted(range(3), key=lambda index: -scores[index])
    answer = ask(ranks, path, query=QUERY, documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], top_n=2)
    assert [each["index"] for each in answer["results"]] == order[:2]
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == pytest.approx([scores[index] for index in order[:2]], abs=TOLERANCE)
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in order[:2]]
    bare = ask(ranks, path, query=QUERY, texts=TEXTS, return_text=True)
    assert [(each["index"], each["text"]) for each in bare] == [(index, TEXTS[index]) for index in order]


def test_a_pair_that_does_not_fit_is_cut_at_the_longer_text_first(ranks: httpx2.Client, reranker: Headed) -> None:
    long = "fjord " * 400
    refused = ranks.post("/score", json={"text_1": QUERY, "text_2": long})
    assert refused.status_code == 400 and "too long" in refused.json()["error"]["message"]
    (entry,) = ask(ranks, "/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=64, truncation_side="right")[
        "data"
    ]
    first, second = ids(ranks, QUERY), ask(ranks, "/tokenize", prompt=long[:600], add_special_tokens=False)["tokens"]
    expected = reranker.logits(first + second[: 64 - len(first)])[0].sigmoid()
    assert entry["score"] == pytest.approx(float(expected), abs=TOLERANCE)


def test_a_body_of_thousands_of_documents_does_not_hold_up_another_request(ranks: httpx2.Client) -> None:
    documents = [f"document {number}" for number in range(1500)]
    answer = ask(ranks, "/rerank", query=QUERY, documents=documents)
    assert sorted(each["index"] for each in answer["results"]) == list(range(1500))
