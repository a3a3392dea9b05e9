"""The page of the API in headless Chromium: every endpoint with its fields, a search, and the box that sends
requests."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tokenloom.scripts.looks.screenshot_pages import Browser
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import KEY
from tokenloom.tests.system.web_pages import DEADLINE_S, browser, needs_chromium, wait_for

pytestmark = needs_chromium
__all__ = ["browser"]  # a fixture

STOP = ".buttons button:nth-child(2)"
READY = "document.documentElement?.dataset.isReady === 'true'"
ACTS_ON_ALL = ("/pause", "/sleep", "/reload", "/start_profile", "/stop_profile", "/restart_replicas", "/log_level")


@pytest.fixture
def docs(browser: Browser, url: str) -> Browser:
    """Open the page, with the key."""
    browser.resize(1280, 900, False)
    browser.call("Page.navigate", url=f"{url}/docs?theme=light")
    wait_for(browser, READY)
    browser.evaluate(f"sessionStorage.setItem('loom-key', {json.dumps(KEY)})")
    browser.complaints.clear()
    return browser


@pytest.fixture
def document(url: str) -> Any:
    return httpx2.get(f"{url}/openapi.json", timeout=DEADLINE_S).json()


def texts(browser: Browser, selector: str, within: str = "") -> list[str]:
    root = f"document.getElementById({json.dumps(within)})" if within else "document"
    found: list[str] = browser.evaluate(
        f"[...{root}.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)"
    )
    return found


def type_into(browser: Browser, selector: str, text: str, within: str = "") -> None:
    """Type as a person does, so that the page gets its events."""
    root = f"document.getElementById({json.dumps(within)})" if within else "document"
    if within:
        browser.evaluate(f"{root}.open = true")
    browser.evaluate(
        f"(() => {{ const it = {root}.querySelector({json.dumps(selector)}); it.value = ''; it.focus(); }})()"
    )
    browser.call("Input.insertText", text=text)


def send(browser: Browser, operation: str) -> None:
    """Send the request of an endpoint's box and wait for the end of its answer."""
    form = f"document.getElementById({json.dumps(operation)}).querySelector('form.try')"
    browser.evaluate(f"{form}.requestSubmit()")
    wait_for(browser, f"{form}.querySelector('[role=status]').textContent && {form}.querySelector('{STOP}').hidden")


def test_every_endpoint_is_shown_with_every_field_and_what_it_means(docs: Browser, document: Any) -> None:
    assert set(texts(docs, "#paths summary code")) == set(document["paths"])
    rows = docs.evaluate(
        "[...document.getElementById('post/v1/chat/completions').querySelectorAll('tr.field')].map(row => "
        "[...row.children].map(cell => cell.textContent))"
    )
    schema = document["components"]["schemas"]["ChatRequest"]
    assert [row[0] for row in rows] == list(schema["properties"]) and rows[0][:3] == [
        "messages",
        "list of Message",
        "required",
    ]
    assert all(row[1] and row[2] and row[3] for row in rows)
    shown = {row[0]: row[1:] for row in rows}
    assert shown["temperature"][:2] == ["number", "1"] and shown["temperature"][2].endswith("(0 to 100)")
    assert shown["top_p"][2].endswith("(above 0, at most 1)") and shown["stop"][2].endswith(
        "(at least 1 character; at most 64 items)"
    )
    groups = texts(docs, "tr.group", "post/v1/chat/completions")
    assert groups == ["required", "sampling", "other fields of the API", "beyond the API", "no effect", "not served"]
    assert docs.complaints == []


def test_each_example_is_answered_by_this_engine(url: str, document: Any) -> None:
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S) as http:
        for path, methods in document["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
            if content is None or path in ACTS_ON_ALL or "{" in path:
                continue
            answer = http.post(path, json=content["example"])
            expected = {"/abort": 404}.get(path, 403 if path.endswith("_lora_adapter") else 200)
            expected = 400 if path.startswith("/kv/") else expected  # this engine has no tiers
            assert answer.status_code == expected, (path, answer.text)


def test_the_box_sends_the_example_and_shows_the_answer_whole_and_as_a_stream(docs: Browser) -> None:
    for operation, path in (
        ("post/v1/chat/completions", "choices"),
        ("post/v1/messages", "content"),
        ("post/api/chat", "message"),
        ("post/v1/responses", "output"),
    ):
        is_streamed_by_default = operation == "post/api/chat"
        send(docs, operation)
        (status,) = texts(docs, "[role=status]", operation)
        assert status.startswith("200 OK · "), (operation, status)
        (answer,) = texts(docs, ".answer", operation)
        assert "Paris" in answer or "Par" in answer
        if not is_streamed_by_default:
            assert path in json.loads(answer)
            docs.evaluate(f"document.getElementById({json.dumps(operation)}).querySelector('.check input').click()")
            send(docs, operation)
        (joined,) = texts(docs, ".joined", operation)
        assert "Paris" in joined, (operation, joined)
    assert docs.complaints == []


def test_a_stream_is_stopped_and_its_request_aborted(docs: Browser, url: str) -> None:
    operation = "post/v1/completions"
    type_into(docs, "textarea", '{"prompt": "The", "max_tokens": 2000, "ignore_eos": true, "stream": true}', operation)
    docs.evaluate(f"document.getElementById({json.dumps(operation)}).querySelector('form.try').requestSubmit()")
    wait_for(docs, f"document.getElementById({json.dumps(operation)}).querySelector('.joined').textContent.length > 20")
    docs.evaluate(f"document.getElementById({json.dumps(operation)}).querySelector('{STOP}').click()")
    wait_for(
        docs,
        f"document.getElementById({json.dumps(operation)}).querySelector('[role=status]').textContent.includes('stopped')",
    )
    wait_until(lambda: httpx2.get(f"{url}/load", timeout=DEADLINE_S).json() == {"server_load": 0})
    assert docs.complaints == []


def test_the_key_is_asked_for_and_sent_and_a_bad_body_is_explained(docs: Browser, url: str) -> None:
    docs.evaluate("sessionStorage.clear()")
    assert not docs.evaluate("document.getElementById('key-form').hidden")
    send(docs, "get/v1/models")
    assert (
        "401" in texts(docs, "[role=status]", "get/v1/models")[0]
        and "API key above" in texts(docs, "[role=status]", "get/v1/models")[0]
    )
    docs.complaints.clear()  # Chromium logs the 401
    type_into(docs, "#key", KEY)
    docs.evaluate("document.getElementById('key').onchange()")
    send(docs, "get/v1/models")
    assert (
        json.loads(texts(docs, ".answer", "get/v1/models")[0])["data"][0]["chat_sampling_params"]["temperature"] == 0.7
    )
    operation = "post/tokenize"
    type_into(docs, "textarea", '{"prompt": ', operation)
    send(docs, operation)
    assert texts(docs, "[role=status]", operation)[0].startswith("Not sent: the body is no JSON: ")
    type_into(docs, "textarea", '{"promt": "x"}', operation)
    send(docs, operation)
    assert (
        texts(docs, "[role=status]", operation)[0].startswith("400 ")
        and "prompt" in texts(docs, ".answer", operation)[0]
    )
    docs.complaints.clear()


def test_the_search_finds_paths_fields_and_fields_of_inner_objects(docs: Browser) -> None:
    visible = (
        "[...document.querySelectorAll('#paths details')].filter(each => each.offsetParent && each.id)"
        ".map(each => each.id)"
    )
    docs.call("Input.dispatchKeyEvent", type="keyDown", key="/", text="/", code="Slash")
    docs.call("Input.dispatchKeyEvent", type="keyUp", key="/", code="Slash")
    assert docs.evaluate("document.activeElement.id") == "search" and not docs.evaluate("document.activeElement.value")
    type_into(docs, "#search", "num_predict")
    wait_for(docs, f"{visible}.length < 10")
    assert docs.evaluate(visible) == [f"post/api/{name}" for name in ("chat", "generate", "embed", "show")]
    type_into(docs, "#search", "top_k likeliest")
    wait_for(docs, f"{visible}.includes('post/v1/completions') && !{visible}.includes('get/health')")
    docs.evaluate("document.getElementById('find').requestSubmit()")
    assert docs.evaluate("document.getElementById('post/v1/completions').open")
    assert texts(docs, "tr.hit td:first-child", "post/v1/completions") == ["top_k"]
    type_into(docs, "#search", "nothing has this")
    wait_for(docs, "document.getElementById('note').textContent.startsWith('0 endpoints match')")
    docs.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    wait_for(docs, f"{visible}.length > 40")
    assert docs.complaints == []


def test_a_link_to_a_hidden_object_opens_it_and_every_control_has_a_name(docs: Browser) -> None:
    type_into(docs, "#search", "detokenize")
    docs.evaluate("location.hash = '#Message'")
    wait_for(docs, "document.getElementById('Message').open && !document.getElementById('Message').hidden")
    nameless = (
        "[...document.querySelectorAll('button, input, textarea, select')].filter(each => "
        "!(each.textContent.trim() || each.getAttribute('aria-label') || each.labels?.length)).length"
    )
    assert docs.evaluate(nameless) == 0
    assert docs.evaluate("[...document.querySelectorAll('th')].every(each => each.scope)")
    assert docs.evaluate("document.querySelector('.skip').hash") == "#paths"


def test_only_the_pages_own_files_may_run(url: str) -> None:
    answer = httpx2.get(f"{url}/docs", timeout=DEADLINE_S)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "<script>" not in answer.text and "style=" not in answer.text and "onclick" not in answer.text


FORM = {  # an endpoint of models that hear audio, which this one does not
    "tags": ["OpenAI"],
    "summary": "Text of a clip of speech",
    "responses": {"200": {"description": "As asked", "content": {}}},
    "requestBody": {
        "content": {
            "multipart/form-data": {
                "schema": {"properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]},
                "example": {"response_format": "json", "include": ["logprobs"]},
            }
        }
    },
}


def test_a_form_is_sent_with_its_file_and_fields(docs: Browser, url: str, document: Any) -> None:
    document["paths"]["/v1/audio/transcriptions"] = {"post": FORM}
    stand_in = (
        "window.asked = window.fetch; window.fetch = async (path, options) => path === 'openapi.json' "
        f"? new Response({json.dumps(json.dumps(document))}) "
        ": (window.sent = [...options.body.entries()].map(([name, value]) => [name, value.name || value]), "
        "new Response('{\"text\": \"hello\"}', {headers: {'content-type': 'application/json'}}));"
    )
    docs.call("Page.enable")  # scripts of new documents need it
    added = docs.call("Page.addScriptToEvaluateOnNewDocument", source=stand_in)
    try:
        docs.call("Page.navigate", url=f"{url}/docs?form")
        operation = "post/v1/audio/transcriptions"
        wait_for(docs, f"{READY} && !!document.getElementById({json.dumps(operation)})")
        docs.evaluate(
            f"(() => {{ const form = document.getElementById({json.dumps(operation)}); "
            "const file = form.querySelector('[type=file]'); "
            "const data = new DataTransfer(); data.items.add(new File(['RIFF'], 'a.wav')); "
            "file.files = data.files; })()"
        )
        send(docs, operation)
        assert docs.evaluate("window.sent") == [["file", "a.wav"], ["response_format", "json"], ["include", "logprobs"]]
        assert json.loads(texts(docs, ".answer", operation)[0]) == {"text": "hello"}
        assert docs.complaints == []
    finally:
        docs.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
        docs.call("Page.disable")
