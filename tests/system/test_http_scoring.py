"""/generative_scoring over a running engine: the numbers of /v1/completions for the same tokens, forms, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import httpx2
import pytest

from tokenloom.tests.system.http_engine import OPTIONS, ask
from tokenloom.tests.system.launched import LaunchedEngine

PATH = "/generative_scoring"
QUERY, ITEMS, LABELS = "Is this city a capital? ", ["Lima is large.", "Oslo", "The capital of Peru is"], [300, 301, 7]
LONG = "The capital of Peru is Lima. " * 700


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedEngine]:
    """Yield an engine whose prompts have the same bits alone and beside others, which are scored in one batch."""
    with LaunchedEngine(tmp_path_factory.mktemp("scoring"), *OPTIONS, "--deterministic") as engine:
        engine.wait_ready()
        yield engine
        assert engine.stop() == 0


def scores(http: httpx2.Client, **body: object) -> list[float]:
    data = ask(http, PATH, **{"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | body)["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    assert all(each["object"] == "score" for each in data)
    return [each["score"] for each in data]


def tokens_of(http: httpx2.Client, text: str, add_special_tokens: bool) -> list[int]:
    body = {"prompt": text, "add_special_tokens": add_special_tokens}
    return list(ask(http, "/tokenize", **body)["tokens"])


def prompts_of(http: httpx2.Client, *, item_first: bool, add_special_tokens: bool) -> list[list[int]]:
    query = tokens_of(http, QUERY, add_special_tokens)
    pieces = [tokens_of(http, item, False) for item in ITEMS]
    return [piece + query if item_first else query + piece for piece in pieces]


def label_logprobs(http: httpx2.Client, prompt: list[int]) -> list[float]:
    """Return the logprob that /v1/completions gives each label after `prompt`."""
    fields = {"max_tokens": 1, "logprobs": 1, "logprob_token_ids": LABELS, "return_tokens_as_token_ids": True}
    (choice,) = ask(http, "/v1/completions", prompt=prompt, **fields)["choices"]
    (by_name,) = choice["logprobs"]["top_logprobs"]
    return [by_name[f"token_id:{label}"] for label in LABELS]


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_score_is_the_softmax_of_the_labels_logprobs_in_completions(
    http: httpx2.Client, item_first: bool, add_special_tokens: bool
) -> None:
    order = {"item_first": item_first, "add_special_tokens": add_special_tokens}
    logprobs = [label_logprobs(http, prompt) for prompt in prompts_of(http, **order)]
    expected = [math.exp(each[0]) / sum(map(math.exp, each)) for each in logprobs]
    assert len({round(each, 6) for each in expected}) == len(ITEMS)
    assert scores(http, **order) == pytest.approx(expected, rel=1e-6)
    whole = [math.exp(each[0]) for each in logprobs]
    assert scores(http, **order, apply_softmax=False) == pytest.approx(whole, rel=1e-6)


def test_token_ids_are_worth_their_text(http: httpx2.Client) -> None:
    ids = [tokens_of(http, item, False) for item in ITEMS]
    expected = scores(http)
    assert scores(http, query=tokens_of(http, QUERY, True), items=ids) == pytest.approx(expected, rel=1e-6)
    assert scores(http, items=[ITEMS[0], *ids[1:]]) == pytest.approx(expected, rel=1e-6)


def test_an_answer_tells_its_id_model_and_usage(http: httpx2.Client) -> None:
    answer = ask(http, PATH, query=QUERY, items=ITEMS, label_token_ids=LABELS, request_id="mine", priority=3)
    num_tokens = sum(map(len, prompts_of(http, item_first=False, add_special_tokens=True)))
    assert (answer["id"], answer["object"], answer["model"]) == ("generative-scoring-mine", "list", "tokenloom-demo")
    counts = {"prompt_tokens": num_tokens, "completion_tokens": len(ITEMS), "total_tokens": num_tokens + len(ITEMS)}
    assert answer["usage"].items() >= counts.items() and answer["created"] > 1e9


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_too_long_is_truncated_on_request(http: httpx2.Client, side: str) -> None:
    ids = tokens_of(http, QUERY, True) + tokens_of(http, LONG, False)
    kept = ids[-2047:] if side == "left" else ids[:2047]
    assert len(ids) > 2 * 2048
    cut_to = {"truncate_prompt_tokens": -1, "truncation_side": side}
    cut = ask(http, PATH, query=QUERY, items=[LONG], label_token_ids=LABELS, **cut_to)
    assert cut["usage"]["prompt_tokens"] == 2047
    logprobs = label_logprobs(http, kept)
    expected = math.exp(logprobs[0]) / sum(map(math.exp, logprobs))
    assert cut["data"][0]["score"] == pytest.approx(expected, rel=1e-6)
