"""A batch of a real engine gives the answers of single requests, for each endpoint, and outlives every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tokenloom.frontend.cli.command import load_command
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import KEY, ask, open_http, open_openai
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.test_state_folder import kill_everything

OVER = ("completed", "failed", "expired", "cancelled")
CHAT = {"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "temperature": 0, "max_tokens": 8}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "The capital of Peru is", "temperature": 1, "seed": 5, "max_tokens": 8, "n": 2},
    "/v1/responses": {"input": "What is the capital of Peru?", "temperature": 0, "max_output_tokens": 8},
    "/v1/embeddings": {"input": ["Lima", "Peru"]},
    "/v1/messages": CHAT,
}


def launched(runtime: Path, folder: Path, *options: str) -> LaunchedEngine:
    command = ("--http", "0", "--api-key", KEY, "--state-dir", str(folder), "--speculation", "off")
    return LaunchedEngine(runtime, *command, *options)


def begin(client: openai.OpenAI, endpoint: str, bodies: list[dict[str, Any]]) -> openai.types.Batch:
    lines = [
        {"custom_id": str(place), "method": "POST", "url": endpoint, "body": body} for place, body in enumerate(bodies)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    def find() -> openai.types.Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in OVER else None

    found = wait_until(find, "the batch is open", 60.0)
    assert found is not None
    return found


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).content.splitlines()]


def plain(value: Any) -> Any:
    """Return an answer without ids, times and cached tokens."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    varies = ("id", "created", "created_at", "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens")
    kept = {name: plain(each) for name, each in value.items() if name not in varies}
    return {name: each for name, each in kept.items() if not name.startswith(("cache_", "input_tokens"))}


def test_lines_get_the_answers_of_single_requests(tmp_path: Path) -> None:
    with launched(tmp_path, tmp_path / "state") as engine:
        engine.wait_ready()
        with open_openai(engine.url, KEY) as client, open_http(engine.url, KEY) as http:
            for endpoint, body in BODIES.items():
                batch = ended(client, begin(client, endpoint, [body, body | {"model": "unknown"}]).id)
                [answer] = lines_of(client, batch.output_file_id)
                assert plain(answer["response"]["body"]) == plain(ask(http, endpoint, body)), endpoint
                [error] = lines_of(client, batch.error_file_id)
                assert error["response"]["status_code"] == 404 and error["response"]["body"]["error"]["message"]
            check_command(engine.url, tmp_path)
        engine.end()


def check_command(url: str, folder: Path) -> None:
    """`engine-launch batch` runs in the engine, and a second run has nothing to do."""
    lines = [
        {"custom_id": endpoint, "method": "POST", "url": endpoint, "body": body}
        for endpoint, body in BODIES.items()
        if endpoint != "/v1/messages"
    ]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [str(folder / "in"), str(folder / "out"), "--url", url, "--api-key", KEY]
    for _ in range(2):
        assert load_command("batch").main(arguments) == 0
        found = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
        assert sorted(line["custom_id"] for line in found) == sorted(line["custom_id"] for line in lines)
        assert all(line["response"]["status_code"] == 200 for line in found)
    with open_openai(url, KEY) as client:
        names = {file.filename for file in client.files.list().data}
        assert "batch.jsonl" not in names, "the command deletes its files"


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_batch_goes_on_after_a_kill_of_every_process_and_no_other_model_runs_it(tmp_path: Path) -> None:
    story = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 200, "temperature": 1, "seed": 3}
    with launched(tmp_path, tmp_path / "state", "--api-server-count", "2") as engine:
        engine.wait_ready()
        with open_openai(engine.url, KEY) as client, open_http(engine.url, KEY) as http:
            calm = ask(http, "/v1/completions", story)
            bodies = [story | {"seed": seed} for seed in range(3, 11)]
            batch = begin(client, "/v1/completions", bodies)
            wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
            kill_everything(engine)
        engine.start_again()
        with open_openai(engine.url, KEY) as client:
            done = ended(client, batch.id)
            lines = lines_of(client, done.output_file_id)
            assert [line["custom_id"] for line in lines] == [str(place) for place in range(len(bodies))]
            assert lines[0]["response"]["body"]["choices"] == calm["choices"]
            left = begin(client, "/v1/completions", [story | {"max_tokens": 2000}, story | {"model": "tokenloom-demo"}])
            wait_until(lambda: client.batches.retrieve(left.id).status == "in_progress")
        engine.end()
    with launched(tmp_path, tmp_path / "state", "--served-model-name", "another") as engine:
        engine.wait_ready()
        with open_openai(engine.url, KEY) as client:
            over = ended(client, left.id)
            errors = lines_of(client, over.error_file_id)
            assert [line["response"]["status_code"] for line in errors] == [404, 404]
            assert all("another" in json.dumps(line) or "tokenloom-demo" in json.dumps(line) for line in errors)
        engine.end()
