"""The flags and keywords that vLLM's users bring, on whole engines: each has vLLM's effect."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tokenloom import LLM, ConfigError, SamplingParams
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.equipped_engine import EquippedEngine
from tokenloom.tests.system.http_engine import ask

FRANCE = "The capital of France is"


def test_every_served_name_is_accepted_and_the_first_is_in_answers(door: httpx2.Client) -> None:
    assert [each["id"] for each in door.get("/v1/models").json()["data"]] == ["first", "second"]
    assert door.get("/v1/models/second").json()["id"] == "second"
    for name in ("first", "second", "", None):
        assert ask(door, "/v1/completions", prompt="a", model=name)["model"] == "first"
        assert ask(door, "/tokenize", prompt="a", model=name)["max_model_len"] == 1024
    refused = door.post("/v1/completions", json={"prompt": "a", "model": "third"})
    assert refused.status_code == 404 and "this engine serves first, second" in refused.text


def test_requests_without_parameters_get_the_checkpoints_defaults(door: httpx2.Client) -> None:
    answers = [ask(door, "/v1/completions", prompt=FRANCE, ignore_eos=True) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"]["completion_tokens"] == 5
    assert answers[0]["choices"][0]["text"].startswith(" Paris.")
    longer = ask(door, "/v1/completions", prompt=FRANCE, ignore_eos=True, max_tokens=7)
    assert longer["usage"]["completion_tokens"] == 7
    turn: dict[str, object] = {"messages": [{"role": "user", "content": "France is"}], "ignore_eos": True}
    assert ask(door, "/v1/chat/completions", **turn)["usage"]["completion_tokens"] == 5
    assert ask(door, "/v1/chat/completions", **turn, max_completion_tokens=6)["usage"]["completion_tokens"] == 6
    response = ask(door, "/v1/responses", input="France is", ignore_eos=True)
    assert response["usage"]["output_tokens"] == 5 and response["temperature"] == 0


def test_an_inline_template_with_its_kwargs_renders_the_prompt(door: httpx2.Client) -> None:
    def tokens(**more: object) -> Any:
        return ask(door, "/tokenize", messages=[{"role": "user", "content": "Peru"}], **more)["tokens"]

    assert tokens() == ask(door, "/tokenize", prompt="The capital of Peru")["tokens"]
    assert tokens(chat_template_kwargs={"opening": ""}) == ask(door, "/tokenize", prompt="Peru")["tokens"]


def test_flags_change_every_answer_as_request_fields_would(door: httpx2.Client) -> None:
    body = {"prompt": FRANCE, "logprobs": 1}
    tokens = ask(door, "/v1/completions", **body)["choices"][0]["logprobs"]["tokens"]
    assert tokens and all(token.startswith("token_id:") for token in tokens)
    turn: dict[str, object] = {"messages": [{"role": "user", "content": "France is"}], "logprobs": True}
    (first, *_) = ask(door, "/v1/chat/completions", **turn)["choices"][0]["logprobs"]["content"]
    assert first["token"].startswith("token_id:") and bytes(first["bytes"]).decode() == " Paris"
    as_text = ask(door, "/v1/completions", **body, return_tokens_as_token_ids=False)
    assert as_text["choices"][0]["logprobs"]["tokens"][0] == " Paris"
    body |= {"stream": True, "stream_options": {"include_usage": False}}
    events = door.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    counts = [json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events]
    assert len(counts) > 1 and counts[0] > 0 and counts[-2:] == [3, 3]


def test_an_answer_reports_its_processing_time(door: httpx2.Client) -> None:
    body: dict[str, Any] = {"prompt": FRANCE, "max_tokens": 4, "ignore_eos": True}
    names = ["queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"]
    begun = time.monotonic()
    metrics = ask(door, "/v1/completions", **body)["metrics"]
    took_ms = (time.monotonic() - begun) * 1000
    assert list(metrics) == names and min(metrics.values()) >= 0
    assert sum(metrics[name] for name in names[:3]) <= took_ms
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3)
    assert metrics["tokens_per_second"] * sum(metrics[name] for name in names[1:3]) == pytest.approx(4000)
    assert "metrics" not in ask(door, "/v1/completions", **body, n=2)
    events = door.post("/v1/completions", json=body | {"stream": True, "max_tokens": 1}).text.split("\n\n")[:-2]
    *others, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert others and not any("metrics" in each for each in others)
    assert set(last["metrics"]) == set(names) - {"mean_itl_ms"} and last["choices"] == []


def test_responses_report_the_load_to_balancers(door: httpx2.Client) -> None:
    def report(form: str) -> str | None:
        headers = {"endpoint-load-metrics-format": form} if form else {}
        answer = door.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        found: str | None = answer.headers.get("endpoint-load-metrics")
        return found

    kind, _, text = (report("JSON") or "").partition(" ")
    load = json.loads(text)["named_metrics"]
    assert kind == "JSON" and set(load) == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert re.fullmatch(
        r"TEXT named_metrics\.kv_cache_usage_perc=[\d.e-]+, named_metrics\.num_requests_waiting=[\d.]+",
        report("text") or "",
    )
    assert report("") is report("BIN") is None


def test_ignored_flags_are_logged_in_one_line_at_the_start(equipped: EquippedEngine) -> None:
    said = [line for line in equipped.errors.read_text().splitlines() if "accepted without effect" in line]
    assert len(said) == 1 and "--swap-space (" in said[0] and "--enable-chunked-prefill (" in said[0]


def test_dummy_weights_need_no_weight_files_and_overrides_shape_the_model(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "mixtral")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "in_process": True}
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        LLM(folder, **options)
    overrides = {"num_hidden_layers": 1, "max_position_embeddings": 96}
    answers = []
    for _ in range(2):
        with LLM(folder, load_format="dummy", hf_overrides=overrides, **options) as llm:
            assert llm.info().max_model_len == 96
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            answers.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] and len(set(answers[0])) > 1
