"""An answer that is cut goes on with its adapter and its media, or ends with an error: never with others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.forms.answer_forms.named import named_form
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.tests.frontend.bench import TEMPLATE, ids
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec, write_adapter
from tokenloom.tests.frontend.server.api.cut_answers import CutApp, Part, continuation_of, texts_of
from tokenloom.tests.frontend.server.http.served_app import KEY, serving
from tokenloom.tests.frontend.server.requests.fake_media import MARKER, FakePlaceholders, fake_media, seeing_spec
from tokenloom.tests.support.in_loop import in_loop

FORM, SCRIPTS = named_form("hermes", "think"), {"plain": "The café is open."}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
(PLACEHOLDER,) = ids(MARKER)
SEEING = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, marker=FakePlaceholders.marker)


def asks(model: str) -> list[tuple[str, dict[str, Any]]]:
    chat = {"model": model, "messages": [{"role": "user", "content": "plain"}], "max_tokens": 60, "stream": True}
    return [
        ("/v1/completions", {"model": model, "prompt": ["plain", "plain too"], "max_tokens": 60, "stream": True}),
        (CHAT, chat | {"n": 2}),
        (CHAT, chat | {"stream": False}),
        (RESPONSES, {"model": model, "input": "plain", "stream": True}),
        (MESSAGES, chat),
    ]


def _adapted(folder: Path) -> Any:
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / "adapters" / name, seed=seed)
    options = {"adapter_folder": str(folder / "adapters"), "allow_runtime_lora": True, "api_key": [KEY]}
    spec = adapter_spec(folder / "run", **options)
    return serving(lambda: CutApp(folder, SCRIPTS, FORM, spec=spec, template=TEMPLATE))


async def load(served: CutApp, name: str, source: str) -> None:
    body = {"lora_name": name, "lora_path": source, "load_inplace": True}
    assert (await served.http.post("/v1/load_lora_adapter", json=body)).status_code == 200


def _joined(parts: Sequence[Part]) -> bytes:
    return b"".join(part.body for part in parts)


@pytest.mark.parametrize("number", range(len(asks(""))))
@in_loop(_adapted)
async def test_an_answer_keeps_its_adapter_though_its_name_has_another_or_none(served: CutApp, number: int) -> None:
    path, body = asks("sql")[number]
    await load(served, "sql", "one")
    parts = await served.parts(path, json.dumps(body).encode(), continuation_of([]))
    await load(served, "sql", "two")
    other = await served.parts(path, json.dumps(body).encode(), continuation_of([]))
    assert _joined(other) != _joined(parts), "the weights decide"
    for num_sent in range(1, len(parts)):
        sent = parts[:num_sent]
        if num_sent > len(parts) / 2 and served.frontend.adapters.get("sql") is not None:
            served.frontend.adapters.unload("sql")
        if not continuation_of(sent).answers:
            continue  # nothing of the answer was shown: any weights may answer
        rest = await served.parts(path, json.dumps(body).encode(), continuation_of(sent))
        if body["stream"]:
            assert texts_of(_joined([*sent, *rest])) == texts_of(_joined(parts)), f"cut after {num_sent} parts"
        else:
            assert _joined(rest) == _joined(parts)


@in_loop(_adapted)
async def test_an_answer_whose_adapter_is_gone_ends_with_an_error(served: CutApp) -> None:
    await load(served, "sql", "one")
    for path, body in asks("sql"):
        if not body["stream"]:
            continue
        parts = await served.parts(path, json.dumps(body).encode(), continuation_of([]))
        continuation = continuation_of(parts[: len(parts) // 2])
        continuation.sources = {
            prompt: each.replace(each[3:35], bytes(32)) for prompt, each in continuation.sources.items()
        }
        rest = _joined(await served.parts(path, json.dumps(body).encode(), continuation))
        assert b"adapter" in rest and b"error" in rest and b"open" not in rest


def _seeing(folder: Path) -> Any:
    media, _ = fake_media(PLACEHOLDER)
    spec = seeing_spec(folder, PLACEHOLDER, allowed_local_media_path=str(folder))
    return serving(lambda: CutApp(folder, SCRIPTS, FORM, spec=spec, template=SEEING, media=media))


def body_with(picture: dict[str, Any], **more: Any) -> bytes:
    content = [{"type": "text", "text": "plain"}, {"type": "image_url", **picture}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 60, "stream": True}
    return json.dumps(body | more).encode()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@in_loop(_seeing)
async def test_an_answer_keeps_its_picture_though_its_url_leads_elsewhere(
    served: CutApp, path: str, tmp_path: Path
) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(b"abc")
    url = {"image_url": {"url": f"file://{picture}"}}
    body = body_with(url)
    parts = await served.parts(path, body, continuation_of([]))
    picture.write_bytes(b"other")
    assert _joined(await served.parts(path, body, continuation_of([]))) != _joined(parts), "the picture decides"
    picture.unlink()
    for num_sent in range(1, len(parts)):
        sent = parts[:num_sent]
        if continuation_of(sent).answers:
            rest = await served.parts(path, body, continuation_of(sent))
            assert _joined([*sent, *rest]) == _joined(parts), f"cut after {num_sent} parts"


@pytest.mark.parametrize("is_changed", [False, True])
@in_loop(_seeing)
async def test_a_picture_that_the_store_has_lost_is_fetched_and_must_be_the_same(
    served: CutApp, is_changed: bool, tmp_path: Path
) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(b"abc")
    body = body_with({"image_url": {"url": f"file://{picture}"}})
    parts = await served.parts(CHAT, body, continuation_of([]))
    served.frontend.media._known.clear()
    stored = [each for each in (tmp_path / "media").rglob("*") if each.is_file()]
    assert stored
    for each in stored:
        each.unlink()
    if is_changed:
        picture.write_bytes(b"xyz")
    sent = parts[: len(parts) // 2]
    rest = await served.parts(CHAT, body, continuation_of(sent))
    if is_changed:
        assert b"its URL has other bytes by now" in _joined(rest) and b"open" not in _joined(rest)
    else:
        assert _joined([*sent, *rest]) == _joined(parts)


@pytest.mark.parametrize("is_lost", [False, True])
@in_loop(_seeing)
async def test_a_background_response_is_made_again_of_its_picture_or_fails(
    served: CutApp, is_lost: bool, tmp_path: Path
) -> None:
    picture, responses = tmp_path / "picture", served.generating.responses
    picture.write_bytes(b"abc")
    parts = [{"type": "input_text", "text": "plain"}, {"type": "input_image", "image_url": f"file://{picture}"}]
    body = {"input": [{"role": "user", "content": parts}], "seed": 3}
    calm = (await served.http.post(RESPONSES, json=body)).json()
    begun = await served.http.post(RESPONSES, json=body | {"background": True})
    running = responses._running[begun.json()["id"]]
    while running.response["status"] == "queued":
        await asyncio.sleep(0)
    running.task.cancel()  # as its frontend ends
    await asyncio.wait([running.task])
    picture.write_bytes(b"other")
    if is_lost:
        served.frontend.media._known.clear()
        for each in (tmp_path / "media").rglob("*"):
            if each.is_file():
                each.unlink()
    await responses.resume()
    (again,) = responses._running.values()
    await again.task
    if is_lost:
        assert again.response["status"] == "failed" and "has other bytes by now" in again.response["error"]["message"]
    else:
        found = [each["output"][0]["content"][0]["text"] for each in (calm, again.response)]
        assert found[0] == found[1], "its last word tells the picture"


@in_loop(_seeing)
async def test_a_picture_by_its_uuid_is_known_to_a_successor(served: CutApp, tmp_path: Path) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(b"abc")
    await served.parts(CHAT, body_with({"image_url": {"url": f"file://{picture}"}, "uuid": "u"}), continuation_of([]))
    body = body_with({"image_url": None, "uuid": "u"})
    parts = await served.parts(CHAT, body, continuation_of([]))
    served.frontend.media._bytes._sources._digest_by_uuid.clear()  # a successor begins without
    sent = parts[: len(parts) // 2]
    rest = await served.parts(CHAT, body, continuation_of(sent))
    assert _joined([*sent, *rest]) == _joined(parts)
