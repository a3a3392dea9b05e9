"""docs/learn/coming_from_tgi.md is right about each endpoint, parameter, flag and metric, and leaves none out."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest

from tokenloom.frontend.forms.openai.schema import CompletionRequest
from tokenloom.tests.system.http_engine import ask, samples
from tokenloom.tests.test_documents import known_flags

PAGE = Path(__file__).resolve().parents[2] / "docs/learn/coming_from_tgi.md"
TEXT = PAGE.read_text(encoding="utf-8")
DIGITS = "[0-9]{3}"
# names of TGI 3.3's documents: docs/source/reference/launcher.md and docs/openapi.json of its repository
PARAMETERS = """
adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar max_new_tokens
repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p watermark
"""
FLAGS = """
model-id revision validation-workers sharded num-shard quantize speculate dtype kv-cache-dtype
trust-remote-code max-concurrent-requests max-best-of max-stop-sequences max-top-n-tokens max-input-tokens
max-input-length max-total-tokens waiting-served-ratio max-batch-prefill-tokens max-batch-total-tokens
max-waiting-tokens max-batch-size cuda-graphs hostname port shard-uds-path master-addr master-port
huggingface-hub-cache weights-cache-override disable-custom-kernels cuda-memory-fraction rope-scaling
rope-factor json-output otlp-endpoint otlp-service-name cors-allow-origin api-key watermark-gamma
watermark-delta ngrok ngrok-authtoken ngrok-edge tokenizer-config-path disable-grammar-support env
max-client-batch-size lora-adapters usage-stats payload-limit enable-prefill-logprobs
"""
PATHS = """
/generate /generate_stream /info /health /metrics /tokenize /chat_tokenize /invocations /v1/chat/completions
/v1/completions /v1/models
"""


def rows(title: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_an_endpoint_is_served_exactly_if_the_page_says_so(http: httpx2.Client) -> None:
    listed = {row[0].strip("`"): row[1] for row in rows("Endpoints")}
    assert listed.keys() >= {*PATHS.split()}
    documented = http.get("/openapi.json").json()["paths"]
    served = {path for path in listed if path in documented or http.get(path).status_code != 404}
    assert {path: "yes" if path in served else "no" for path in listed} == listed


def test_each_parameter_of_generate_has_a_field_or_is_said_not_to_be_served() -> None:
    listed = {row[0].strip("`"): row[1] for row in rows("Parameters of `/generate`")}
    assert listed.keys() == {*PARAMETERS.split()}
    fields = {name.strip("`") for name in listed.values() if name != "–"}
    assert fields <= set(CompletionRequest.__struct_fields__)
    assert {name for name, field in listed.items() if field == "–"} == {"typical_p", "watermark"}


def test_the_fields_in_place_of_parameters_act(http: httpx2.Client) -> None:
    """As the notes of the table say: greedy, with the prompt, its logprobs, a grammar, and its end alone."""
    greedy = {"prompt": "The capital of France is", "temperature": 0}
    whole = ask(http, "/v1/completions", greedy, max_tokens=4, echo=True, prompt_logprobs=0, logprobs=0)
    (choice,) = whole["choices"]
    assert choice["text"].startswith("The capital of France is Paris") and choice["finish_reason"]
    assert choice["prompt_logprobs"][1] and choice["logprobs"]["token_logprobs"]
    forms = {"structured_outputs": {"regex": DIGITS}, "response_format": {"type": "regex", "value": DIGITS}}
    for field, grammar in forms.items():
        numbered = ask(http, "/v1/completions", greedy, max_tokens=8, **{field: grammar})
        assert re.fullmatch(DIGITS, numbered["choices"][0]["text"])
    form = {"type": "json", "value": {"enum": ["red", "blue"]}}
    chosen = ask(http, "/v1/completions", greedy, max_tokens=20, response_format=form)
    assert chosen["choices"][0]["text"] in ('"red"', '"blue"')
    cut = ask(http, "/v1/completions", greedy, max_tokens=1, truncate_prompt_tokens=2)
    assert cut["usage"]["prompt_tokens"] == 2
    unknown = http.post("/v1/completions", json={**greedy, "max_tokens": 1, "typical_p": 0.9})
    assert unknown.status_code == 200 and "typical_p" in unknown.headers["warning"]


def test_generate_is_a_404_with_a_way_on(http: httpx2.Client) -> None:
    refused = http.post("/generate", json={"inputs": "The capital of France is"})
    assert refused.status_code == 404 and "/openapi.json" in refused.json()["error"]["message"]


def test_each_flag_of_the_launcher_has_an_option_or_the_reason_for_none() -> None:
    listed = {flag: row[1:] for row in rows("Flags of the launcher") for flag in names(row[0])}
    said = listed.keys() | {"--otlp-service-name"}  # in the note of --otlp-endpoint
    assert said == {f"--{name}" for name in FLAGS.split()}
    options = set.union(*(names(cells[0]) for cells in listed.values()))
    assert len(options) > 25 and options <= known_flags()
    assert all(cells[0] != "–" or cells[1] for cells in listed.values())


def test_each_metric_in_place_of_theirs_exists(http: httpx2.Client) -> None:
    theirs, ours = zip(*((names(row[0]), row[1].strip("`")) for row in rows("Metrics")), strict=True)
    assert all(name.startswith("tgi_") for found in theirs for name in found)
    there = {name.partition("{")[0] for name in samples(http)}
    missing = [name for name in ours if not {name, f"{name}_count"} & there]
    assert missing == []


@pytest.mark.parametrize("name", ["max-model-len", "default-max-tokens"])
def test_the_commands_on_the_page_use_options_that_exist(name: str) -> None:
    assert f"--{name}" in TEXT and f"--{name}" in known_flags()
