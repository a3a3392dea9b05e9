"""Keys of --api-key-file: limits in each API's form, adapters, usage, and changes of the file while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tokenloom.frontend.listening.keys.api_keys import CHECK_S, read_keys
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.core import TenantRef
from tokenloom.tests.frontend.server.http.served_app import KEY, serving
from tokenloom.tests.frontend.server.http.test_adapters import Served
from tokenloom.tests.support.in_loop import in_loop

FILE = """
[[key]]
name = "alice"
secret = "sk-alice"
weight = 2.5
open_requests = 2
adapters = ["one"]

[[key]]
name = "bob"
secret = "sk-bob"
tokens_per_minute = 12
adapters = []
"""
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": False}


class KeyServed(Served):
    def __init__(self, tmp_path: Path) -> None:
        self.key_file = tmp_path / "keys.toml"
        self.key_file.write_text(FILE)
        (tmp_path / "run").mkdir()
        super().__init__(tmp_path, api_key_file=str(self.key_file))
        self.now = self.loop.time()
        self.frontend.keys._monotonic = lambda: self.now

    async def post(self, path: str, key: str, body: dict[str, Any] = CHAT) -> httpx2.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

    async def use(self, key: str = KEY) -> dict[str, dict[str, Any]]:
        answer = await self.http.get("/usage", headers={"authorization": f"Bearer {key}"})
        return {each["name"]: each for each in answer.json()["data"]}

    def write(self, text: str) -> None:
        self.key_file.write_text(text)
        os.utime(self.key_file, ns=(0, int(1e9 * self.now)))
        self.now += CHECK_S


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "tokenloom.http")


@in_loop(lambda folder: serving(lambda: KeyServed(folder)))
async def test_a_key_at_a_limit_gets_429_in_the_form_of_each_api(served: KeyServed) -> None:
    served.is_held = True
    held = [asyncio.ensure_future(served.post("/v1/chat/completions", "sk-alice")) for _ in range(2)]
    while len(served.requests) < 2:
        await asyncio.sleep(0)
    assert {each.tenant for each in served.requests} == {TenantRef(name="alice", weight=2.5)}
    client = openai.AsyncOpenAI(base_url="http://app/v1", api_key="sk-alice", max_retries=0, http_client=served.http)
    with pytest.raises(openai.RateLimitError, match="key alice has 2 open requests, at most 2 may be") as error:
        await client.chat.completions.create(model="sample", messages=CHAT["messages"])  # type: ignore[arg-type]
    assert error.value.code == "rate_limit_exceeded" and error.value.response.headers["retry-after"] == "1"
    message = (await served.post("/v1/messages", "sk-alice", {**CHAT, "model": "sample"})).json()
    assert message["type"] == "error" and message["error"]["type"] == "rate_limit_error"
    for path, body in (
        ("/api/chat", {"messages": CHAT["messages"], "stream": True}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        answer = await served.post(path, "sk-alice", body)
        assert answer.status_code == 429 and "open requests" in answer.text, (path, answer.text)
    use = await served.use()
    assert (use["alice"]["open_requests"], use["alice"]["refused"], use["bob"]["requests"]) == (2, 6, 0)
    served.is_held = False
    served.answer_all()
    assert [(await each).status_code for each in held] == [200, 200]
    (own,) = (await served.use("sk-alice")).values()
    assert own["open_requests"] == 0 and own["output_tokens"] == 2 and own["limits"]["open_requests"] == 2
    usage = (await held[0]).json()["usage"]
    assert own["prompt_tokens"] == 2 * usage["prompt_tokens"] and own["tokens_last_minute"] == 2 * usage["total_tokens"]


@in_loop(lambda folder: serving(lambda: KeyServed(folder)))
async def test_tokens_of_a_minute_and_adapters_are_limited(served: KeyServed) -> None:
    body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}
    assert (await served.post("/v1/completions", "sk-bob", body)).status_code == 200
    assert (await served.post("/v1/completions", "sk-bob", body)).status_code == 200
    refused = await served.post("/v1/completions", "sk-bob", {**body, "prompt": [1]})
    assert refused.status_code == 429 and 55 <= int(refused.headers["retry-after"]) <= 60
    assert "has used 12 tokens in the last minute, at most 12 may be, and the prompt has 1" in refused.text
    await served.load("one", "one")
    for key, status in (("sk-alice", 200), ("sk-bob", 403), (KEY, 200)):
        assert (await served.post("/v1/completions", key, {**body, "model": "one"})).status_code == status
    listed = await served.http.get("/v1/models", headers={"authorization": "Bearer sk-bob"})
    assert [each["id"] for each in listed.json()["data"]] == ["sample"]
    for path in ("/pause", "/dashboard/abort"):
        assert (await served.post(path, "sk-alice", {"key": "x"})).status_code == 403
    of_alice = {"authorization": "Bearer sk-alice"}
    assert (await served.http.get("/dashboard/data", headers=of_alice)).status_code == 403
    metrics = (await served.http.get("/metrics")).text
    assert 'tokenloom_key_prompt_tokens_total{engine="0",key="bob",model_name="sample"} 10.0' in metrics
    assert "sk-" not in metrics


@in_loop(lambda folder: serving(lambda: KeyServed(folder)))
async def test_a_changed_file_is_read_and_a_bad_one_changes_nothing(served: KeyServed) -> None:
    served.write(FILE.replace("sk-alice", "sk-new").replace("2.5", "1.0"))
    assert (await served.post("/v1/chat/completions", "sk-alice")).status_code == 401
    assert (await served.post("/v1/chat/completions", "sk-new")).status_code == 200
    served.write(FILE + "[[key]]\nname = 7\n")
    assert (await served.post("/v1/chat/completions", "sk-new")).status_code == 200
    served.key_file.unlink()
    served.now += CHECK_S
    assert (await served.post("/v1/chat/completions", "sk-new")).status_code == 200
    served.write("# each line is a key\nsk-plain\n")
    assert (await served.post("/v1/chat/completions", "sk-plain")).status_code == 200
    assert await served.use("sk-plain") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 keys"),
        ('{"key": [{"secret": ""}]}', "secret of key 1 must be at least 1 printable"),
        ('[[key]]\nname = "a b"\nsecret = "s3cret"', "name of key 1 must be letters"),
        (
            '[[key]]\nname = "a"\nsecret = "s3cret"\n[[key]]\nname = "a"\nsecret = "other"',
            "two keys with the same name",
        ),
        ('[[key]]\nname = "a"\nsecret = "s3cret"\nweigth = 2', "unknown field `weigth`"),
        ('[[key]]\nname = "a"\nsecret = "s3cret"\nweight = 0', "`float` > 0"),
        ('[[key]]\nname = "a"\nsecret = "s3cret"\n[[key]]\nsecret = "other"', "give each a name"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_without_secrets(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_keys(path)
    assert message in str(error.value) and "s3cret" not in str(error.value)
