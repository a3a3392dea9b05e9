"""LoRA adapters over HTTP as in vLLM: loading, unloading, listing, and `model` on every route.

The official client calls the app without sockets; the test is the core and answers with a token of each adapter.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.base import BulkArray
from tokenloom.ipc.messages.core import EngineCoreOutputs, EngineCoreRequest, Finished
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.tests.frontend.bench import TEMPLATE, ids
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec, write_adapter
from tokenloom.tests.frontend.server.http.served_app import KEY, ServedApp, serving
from tokenloom.tests.support.in_loop import in_loop

TOKENS = ids("base one two")  # of the model, and of the adapters in the order in which they answer first
VECTOR = BulkArray(dtype="float32", shape=[2], data=array("f", [0.5, 0.5]).tobytes())


class Served(ServedApp):
    """A core that holds requests while `is_held`."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.folder = tmp_path / "adapters"
        for seed, name in enumerate(("one", "two")):
            write_adapter(self.folder / name, seed=seed)
        options = {"allow_runtime_lora": True, "adapter_folder": str(self.folder), "api_key": [KEY], **options}
        super().__init__(adapter_spec(tmp_path / "run", **options), TEMPLATE)
        self.is_held = False
        self.requests: list[EngineCoreRequest] = []
        self.digests: list[bytes] = [b""]

    def turn(self) -> None:
        self.requests += [message for message in self.messages_to_core() if isinstance(message, EngineCoreRequest)]
        if not self.is_held:
            self.answer_all()

    def answer_all(self) -> None:
        for request in self.requests:
            digest = b"" if request.adapter is None else request.adapter.digest
            if digest not in self.digests:
                self.digests.append(digest)
            (key,) = (child.key for child in request.children)
            vector = None if request.pooling is None else VECTOR
            token_ids = [] if vector else [TOKENS[self.digests.index(digest)]]
            self.frontend.on_core_message(
                EngineCoreOutputs(
                    accepted=[key],
                    keys=encode_ids([key] * len(token_ids)),
                    starts=encode_ids([0] * len(token_ids)),
                    counts=encode_ids([1] * len(token_ids)),
                    token_ids=encode_ids(token_ids),
                    finished=[Finished(key=key, reason="length", vector=vector)],
                )
            )
        self.requests.clear()
        self.frontend.tick(self.loop.time())

    async def load(self, name: str, path: str = "", **more: Any) -> httpx2.Response:
        body = {"lora_name": name, "lora_path": path or name, **more}
        return await self.http.post("/v1/load_lora_adapter", json=body)

    async def unload(self, name: str) -> httpx2.Response:
        return await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def text(self, model: str) -> str:
        answer = await self.client.completions.create(model=model, prompt="x", max_tokens=1)
        assert answer.model == model
        return str(answer.choices[0].text)

    async def names(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "tokenloom.http")


def with_served(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test in a loop, with a served app of these options."""
    return in_loop(lambda folder: serving(lambda: Served(folder, **options)))


def error_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


@with_served()
async def test_an_adapter_is_loaded_listed_used_and_unloaded(served: Served) -> None:
    response = await served.load("sql", "one")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    base, adapter = [model async for model in served.client.models.list()]
    assert (base.id, base.parent) == ("sample", None)  # type: ignore[attr-defined]
    assert (adapter.id, adapter.parent, adapter.owned_by) == ("sql", "sample", "tokenloom")  # type: ignore[attr-defined]
    assert adapter.root == str(served.folder / "one")  # type: ignore[attr-defined]
    assert await served.client.models.retrieve("sql") == adapter
    assert await served.text("sql") != await served.text("sample")
    response = await served.unload("sql")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert await served.names() == ["sample"]
    with pytest.raises(openai.NotFoundError, match="the model 'sql' is not served here: this engine serves sample"):
        await served.text("sql")
    with pytest.raises(openai.NotFoundError, match="the model 'sql' is not served here"):
        await served.client.models.retrieve("sql")


@with_served()
async def test_statuses_and_texts_are_those_of_vllm(served: Served) -> None:
    assert (await served.load("sql", "one")).status_code == 200
    text = "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set "
    assert error_of(await served.load("sql", "two")) == (400, text + "'load_inplace' to True.")
    for body in ({}, {"lora_name": "a"}, {"lora_path": "one"}, {"lora_name": "", "lora_path": "one"}):
        response = await served.http.post("/v1/load_lora_adapter", json=body)
        assert error_of(response) == (400, "Both 'lora_name' and 'lora_path' must be provided.")
    status, text = error_of(await served.load("b", "missing"))
    assert status == 404 and text.startswith("No adapter found for missing")
    response = await served.http.post("/v1/unload_lora_adapter", json={"lora_int_id": 1})
    assert error_of(response) == (400, "'lora_name' needs to be provided to unload a LoRA adapter.")
    response = await served.unload("b")
    assert error_of(response) == (404, "The lora adapter 'b' cannot be found.")
    assert response.json()["error"]["type"] == "NotFoundError"


@with_served()
async def test_unloading_and_loading_in_place_leave_requests_in_flight_their_adapter(served: Served) -> None:
    await served.load("sql", "one")
    one = await served.text("sql")
    served.is_held = True
    calls = [asyncio.create_task(served.text("sql"))]
    while len(served.requests) < 1:
        await asyncio.sleep(0)
    assert (await served.load("sql", "two", load_inplace=True)).status_code == 200
    calls.append(asyncio.create_task(served.text("sql")))
    while len(served.requests) < 2:
        await asyncio.sleep(0)
    assert (await served.unload("sql")).status_code == 200
    served.is_held = False
    served.answer_all()
    old, new = await asyncio.gather(*calls)
    assert old == one and new not in (one, await served.text("sample"))


@with_served()
async def test_every_route_takes_an_adapter_as_model_and_names_it(served: Served) -> None:
    message = [{"role": "user", "content": "x"}]
    routes: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ["x", "y"]},
        "/v1/chat/completions": {"messages": message},
        "/v1/chat/completions/batch": {"messages": [message, message]},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": message, "max_tokens": 1},
        "/v1/embeddings": {"input": "x"},
        "/invocations": {"prompt": "x"},
    }

    digest = adapter_digest(served.folder / "one")
    for route, body in routes.items():
        served.is_held = True
        call = asyncio.create_task(served.http.post(route, json=body | {"model": "one"}))
        while not served.requests:
            await asyncio.sleep(0.001)
            assert not call.done(), call.result().text
        assert {request.adapter and request.adapter.digest for request in served.requests} == {digest}, route
        served.is_held = False
        served.answer_all()
        answer = await call
        assert (answer.status_code, answer.json()["model"]) == (200, "one"), route
        response = await served.http.post(route, json=body | {"model": "nil"})
        assert response.status_code == 404 and "is not served here" in response.text, route
    events = (await served.http.post("/v1/completions", json={"prompt": "x", "model": "one", "stream": True})).text
    assert events.count('"model":"one"') == events.count("data: {") > 0
    for route, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": message}),
        ("/v1/responses/input_tokens", {"input": "x"}),
    ):
        assert (await served.http.post(route, json=body | {"model": "one"})).status_code == 200, route
        assert (await served.http.post(route, json=body | {"model": "nil"})).status_code == 404, route


@with_served()
async def test_http_requests_load_only_from_beneath_the_adapter_folder(served: Served, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", seed=5)
    (served.folder / "link").symlink_to(outside)
    (served.folder / "files").mkdir()
    for file in outside.iterdir():
        os.symlink(file, served.folder / "files" / file.name)
    for path in ("../outside", str(outside), "link", "files", "one/../../outside"):
        status, text = error_of(await served.load("sql", path))
        assert status == 400 and "is not beneath --adapter-folder" in text and "put" in text, path
    for path in ("x" * 256, "x/" * 3000, "a\0b", "../" * 50 + "a\0b"):
        status, text = error_of(await served.load("sql", path))
        assert status in (400, 404) and str(served.folder) not in text, path
    status, text = error_of(await served.load("../sql", "one"))
    assert status == 400 and "leave out '..'" in text
    assert (await served.load("sql", str(served.folder / "one"))).status_code == 200
    assert await served.names() == ["sample", "sql"]


@with_served(allow_runtime_lora=False)
async def test_without_allow_runtime_lora_nothing_is_loaded_or_unloaded(served: Served) -> None:
    for response in (await served.load("sql", "one"), await served.unload("sql")):
        assert error_of(response) == (
            403,
            "adapters are not loaded over HTTP here: start with --allow-runtime-lora and --adapter-folder",
        )
    assert await served.text("one") != await served.text("sample"), "sub-folders are found by their names"


@with_served()
async def test_a_background_response_is_made_again_with_its_adapter_by_the_next_frontend(
    served: Served, tmp_path: Path
) -> None:
    served.is_held = True
    body = {"input": "x", "model": "one", "background": True}
    response = (await served.http.post("/v1/responses", json=body)).json()
    assert (response["model"], response["status"]) == ("one", "queued")
    digest = adapter_digest(served.folder / "one")
    assert (await served.load("one", "two", load_inplace=True)).status_code == 200
    replaced = Served(tmp_path)
    replaced.is_held = True
    await replaced.generating.responses.resume()
    while not replaced.requests:
        await asyncio.sleep(0.001)
    (request,) = replaced.requests
    assert request.adapter is not None and request.adapter.digest == digest
    replaced.is_held = False
    replaced.answer_all()
    while (found := (await replaced.http.get(f"/v1/responses/{response['id']}")).json())["status"] != "incomplete":
        await asyncio.sleep(0.001)
    assert found["model"] == "one"
    await replaced.close()


@with_served()
async def test_the_access_log_names_the_adapter(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    await served.text("one")
    await served.text("sample")
    adapted, base = (line for line in capsys.readouterr().err.splitlines() if "POST /v1/completions" in line)
    assert " tokens 1+1 adapter one id " in adapted and "adapter" not in base
