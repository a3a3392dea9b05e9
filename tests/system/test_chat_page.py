"""The chat page in headless Chromium: answers, Markdown, and conversations that outlive a reload."""

from __future__ import annotations

import json

import httpx2
import pytest

from tokenloom.scripts.looks.screenshot_pages import Browser
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import served
from tokenloom.tests.system.web_pages import DEADLINE_S, READY, browser, needs_chromium, open_page, wait_for

pytestmark = needs_chromium
__all__ = ["browser"]  # a fixture

KEY = "sk-dash"
ENDED = "!document.querySelector('[aria-busy]') && document.getElementById('stop').hidden"
engine = served("--http", "0", "--api-key", KEY)


@pytest.fixture
def chat(browser: Browser, url: str) -> Browser:
    """Open the page without conversations and settings."""
    forget = "indexedDB.deleteDatabase('tokenloom'); localStorage.clear(); sessionStorage.clear(); "
    open_page(browser, url, "chat", f"{forget} sessionStorage.setItem('loom-key', {json.dumps(KEY)})")
    wait_for(browser, READY["chat"])
    browser.complaints.clear()  # Chromium logs the 401 of the first load
    set_value(browser, "temperature", "0")
    return browser


def set_value(browser: Browser, field: str, value: str) -> None:
    browser.evaluate(
        f"(() => {{ const field = document.getElementById({json.dumps(field)}); field.value = {json.dumps(value)}; "
        "field.onchange && field.onchange(); })()"
    )


def say(browser: Browser, text: str) -> None:
    set_value(browser, "message", text)
    browser.evaluate("document.getElementById('send').click()")


def click(browser: Browser, label: str, within: str = "document") -> None:
    """Click the last button with a label, which may be one for screen readers."""
    script = (
        f"[...{within}.querySelectorAll('button')].filter(each => each.textContent === LABEL || "
        "each.getAttribute('aria-label') === LABEL).pop().click()"
    )
    browser.evaluate(script.replace("LABEL", json.dumps(label)))


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent.trim())"
    )
    return found


def wait_answers(browser: Browser, count: int) -> None:
    wait_for(browser, f"{ENDED} && document.querySelectorAll('.assistant .note').length === {count}")


def streams(browser: Browser, *deltas: dict[str, object]) -> None:
    """Let the next requests get these deltas, and keep the body of the last request."""
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    browser.evaluate(
        "window.plain = window.plain || window.fetch; window.fetch = async (path, options) => "
        f"{{ window.sent = JSON.parse(options.body); return new Response({json.dumps(lines)}); }}"
    )


def test_a_conversation_goes_on_and_outlives_a_reload(chat: Browser, url: str) -> None:
    for number, country in enumerate(("Peru", "Norway"), start=1):
        say(chat, f"What is the capital of {country}?")
        wait_answers(chat, number)
    answers = texts(chat, ".assistant .text")
    assert "Lima" in answers[0] and "Oslo" in answers[1]
    assert all("tokens/s" in note for note in texts(chat, ".assistant .note"))
    assert texts(chat, "#conversations .open") == ["What is the capital of Peru?"]
    chat.call("Page.navigate", url=f"{url}/chat")
    wait_for(chat, f"{READY['chat']} && document.querySelectorAll('.turn').length === 4")
    assert texts(chat, ".assistant .text") == answers
    chat.evaluate("document.getElementById('new').click()")
    assert texts(chat, ".turn") == [] and texts(chat, "#conversations .open") == ["What is the capital of Peru?"]
    assert chat.complaints == []


def test_a_conversation_is_renamed_deleted_and_brought_back(chat: Browser, url: str) -> None:
    streams(chat, {"content": "Lima"})
    say(chat, "first")
    wait_answers(chat, 1)
    click(chat, "Rename first")
    chat.evaluate("document.querySelector('#conversations input').value = 'Capitals'")
    chat.evaluate("document.querySelector('#conversations input').onblur()")
    wait_for(chat, "document.querySelector('#conversations .open')?.textContent === 'Capitals'")
    click(chat, "Delete Capitals")
    wait_for(chat, "!document.getElementById('toast').hidden && !document.querySelector('.turn')")
    click(chat, "Undo", "document.getElementById('toast')")
    wait_for(chat, "document.querySelectorAll('.turn').length === 2")
    chat.call("Page.navigate", url=f"{url}/chat")
    wait_for(chat, f"{READY['chat']} && document.querySelector('#conversations .open')?.textContent === 'Capitals'")
    assert chat.complaints == []


def test_a_message_is_edited_and_an_answer_made_again(chat: Browser) -> None:
    say(chat, "What is the capital of Peru?")
    wait_answers(chat, 1)
    click(chat, "Edit")
    chat.evaluate("document.querySelector('.edit textarea').value = 'What is the capital of Norway?'")
    chat.evaluate("document.querySelector('.edit').requestSubmit()")
    wait_for(chat, f"{ENDED} && document.querySelector('.assistant .text')?.textContent.includes('Oslo')")
    assert texts(chat, ".user .text") == ["What is the capital of Norway?"]
    click(chat, "Again")
    wait_answers(chat, 1)
    assert "Oslo" in texts(chat, ".assistant .text")[0] and len(texts(chat, ".turn")) == 2
    assert chat.complaints == []


def test_stop_aborts_the_request_and_keeps_the_text_with_its_count(chat: Browser, url: str) -> None:
    chat.evaluate(
        "window.plain = window.fetch; window.fetch = (path, options) => "
        "plain(path, {...options, body: options.body.replace('{', '{\"ignore_eos\":true,')})"
    )
    say(chat, "hi")
    wait_for(chat, "document.querySelector('.assistant .text')?.textContent.length > 20")
    assert not chat.evaluate("document.getElementById('stop').hidden")
    chat.evaluate("document.onkeydown(new KeyboardEvent('keydown', {key: 'Escape'}))")
    wait_answers(chat, 1)
    (note,) = texts(chat, ".assistant .note")
    assert note.startswith("stopped · ") and "tokens · " in note
    wait_until(lambda: httpx2.get(f"{url}/load", timeout=DEADLINE_S).json() == {"server_load": 0})
    assert chat.complaints == []


MARKDOWN = """# Head

| a | b |
|---|---|
| 1 | **two** |

1. one
   - deep

> said

```py
print(1)
```
and `x` [link](http://elsewhere.example/) ![picture](http://elsewhere.example/p.png) <b>raw</b>
<img src=x onerror="window.isBroken = true"> [bad](javascript:window.isBroken=true)
"""


def test_markdown_is_drawn_whole_and_cannot_run_or_fetch_anything(chat: Browser) -> None:
    streams(chat, *({"content": MARKDOWN[start : start + 7]} for start in range(0, len(MARKDOWN), 7)))
    say(chat, "hi")
    wait_answers(chat, 1)
    for selector, text in (
        ("h1", "Head"),
        ("td strong", "two"),
        ("ol ul li", "deep"),
        ("blockquote p", "said"),
        ("pre code", "print(1)"),
        ("p code", "x"),
    ):
        assert texts(chat, f".assistant .text {selector}") == [text], selector
    assert "<b>raw</b>" in texts(chat, ".assistant .text")[0]
    links = chat.evaluate("[...document.querySelectorAll('.assistant .text a')].map(each => [each.href, each.rel])")
    assert links == [[f"http://elsewhere.example/{path}", "noopener noreferrer"] for path in ("", "p.png")]
    assert chat.evaluate("document.querySelectorAll('.assistant .text img').length") == 0
    assert not chat.evaluate("!!window.isBroken")
    assert chat.complaints == []


def test_thoughts_and_calls_are_folded_and_calls_are_sent_back(chat: Browser) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "find", "arguments": '{"a":'}}
    rest = {"index": 0, "function": {"arguments": "1}"}}
    thoughts: list[dict[str, object]] = [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}]
    streams(chat, *thoughts, {"content": "So: "}, {"tool_calls": [call]}, {"tool_calls": [rest]})
    say(chat, "hi")
    wait_answers(chat, 1)
    assert texts(chat, ".assistant summary") == ["Reasoning", "Call of find"]
    assert texts(chat, ".assistant .call pre") == ['{\n  "a": 1\n}']
    assert not chat.evaluate("document.querySelector('.assistant .call').open")
    assert texts(chat, ".assistant details span") == ["Let me think."]
    assert not chat.evaluate("document.querySelector('.assistant details').open")
    say(chat, "go on")
    wait_answers(chat, 2)
    sent = chat.evaluate("window.sent.messages")
    assert sent[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a":1}'}}
    ]
    assert (sent[1]["content"], sent[1]["reasoning"]) == ("So: ", "Let me think.")
    assert chat.complaints == []


def test_calls_of_a_stored_conversation_are_shown(chat: Browser, url: str) -> None:
    calls: list[dict[str, object]] = [
        {
            "index": 0,
            "id": "a",
            "function": {"name": "<b>find</b>", "arguments": '{"who": "<img src=x onerror=alert(1)>"}'},
        },
        {"index": 1, "id": "b", "function": {"name": "now", "arguments": '{"torn":'}},
    ]
    streams(chat, {"tool_calls": calls})
    say(chat, "hi")
    wait_answers(chat, 1)
    chat.call("Page.navigate", url=f"{url}/chat")
    wait_for(chat, f"{READY['chat']} && document.querySelectorAll('.assistant .call').length === 2")
    assert texts(chat, ".assistant .call summary") == ["Call of <b>find</b>", "Call of now"]
    shown = ['{\n  "who": "<img src=x onerror=alert(1)>"\n}', '{"torn":']
    assert texts(chat, ".assistant .call pre") == shown and not chat.evaluate("!!document.querySelector('.call img')")
    assert chat.complaints == []


def test_a_call_stays_open_while_its_arguments_arrive(chat: Browser) -> None:
    chat.evaluate(
        "window.fetch = async () => "
        "new Response(new ReadableStream({start(controller) { window.stream = controller; }}))"
    )
    say(chat, "hi")
    send_call(chat, "find", '{"a": ')
    wait_for(chat, "document.querySelector('.call pre')?.textContent === '{\"a\": '")
    chat.evaluate("document.querySelector('.call').open = true")
    send_call(chat, "", "1}")
    wait_for(chat, "document.querySelector('.call pre').textContent.includes('\\n')")
    assert chat.evaluate("document.querySelector('.call').open")
    chat.evaluate("window.stream.close()")
    wait_answers(chat, 1)
    assert chat.complaints == []


def send_call(browser: Browser, name: str, arguments: str) -> None:
    """Send a piece of a call through the stream of the test."""
    call = {"index": 0, "id": "c", "function": {"name": name, "arguments": arguments}}
    event = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]}
    line = f"data: {json.dumps(event)}\n\n"
    browser.evaluate(f"window.stream.enqueue(new TextEncoder().encode({json.dumps(line)}))")


def test_a_refused_message_says_why_and_comes_back_to_the_box(chat: Browser) -> None:
    say(chat, "word " * 3000)
    wait_for(chat, f"{ENDED} && !!document.querySelector('.error')")
    assert "too long" in texts(chat, ".error")[0]
    assert chat.evaluate("document.getElementById('message').value").startswith("word word")
    set_value(chat, "temperature", "9")
    streams(chat, {"content": "never"})
    say(chat, "hi")
    assert not chat.evaluate("document.getElementById('temperature').checkValidity() || !!window.sent")
    assert not chat.evaluate("document.getElementById('settings').hidden"), "the field says what it wants"
    chat.complaints.clear()  # Chromium logs the 400


def test_without_defaults_of_the_model_an_answer_is_sampled_mildly_and_ends(chat: Browser) -> None:
    streams(chat, {"content": "x"})
    set_value(chat, "temperature", "")
    say(chat, "hi")
    wait_answers(chat, 1)
    sent = chat.evaluate("window.sent")
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 0.9, 40) and sent["max_tokens"] == 2048
    assert chat.evaluate("document.getElementById('temperature').placeholder") == "0.7"


def test_images_and_adapters_are_offered_where_the_model_has_them(chat: Browser) -> None:
    assert chat.evaluate("document.getElementById('attach').hidden && document.getElementById('choice').hidden")
    cards = [
        {
            "id": "/models/base.gguf",
            "max_model_len": 9,
            "input_modalities": ["text", "image"],
            "default_sampling_params": {},
        }
    ]
    cards.append({**cards[0], "id": "sql", "parent": "base"})
    streams(chat, {"content": "seen"})
    chat.evaluate(
        "(() => { const answers = window.fetch; window.fetch = async (path, options) => path === 'v1/models' ? "
        f"new Response({json.dumps(json.dumps({'data': cards}))}) : answers(path, options); "
        "document.getElementById('key-form').requestSubmit(); })()"
    )
    wait_for(chat, "!document.getElementById('attach').hidden && !document.getElementById('choice').hidden")
    assert texts(chat, "#models option") == ["base.gguf", "sql (adapter)"]
    set_value(chat, "models", "sql")
    chat.evaluate(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['abc'], 'a.png', {type: 'image/png'})); "
        "document.ondrop({preventDefault() {}, dataTransfer: data}); })()"
    )
    wait_for(chat, "document.querySelectorAll('#attached li').length === 1")
    say(chat, "what is it?")
    wait_answers(chat, 1)
    sent = chat.evaluate("window.sent")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    assert sent["model"] == "sql" and sent["messages"][-1]["content"] == [
        image,
        {"type": "text", "text": "what is it?"},
    ]
    assert chat.evaluate("document.querySelector('.user img').alt") == "a.png"


def test_on_a_phone_the_list_is_a_drawer(chat: Browser) -> None:
    chat.resize(390, 800, True)
    visible = "getComputedStyle(document.getElementById('side')).visibility"
    assert chat.evaluate(visible) == "hidden"
    chat.evaluate("document.getElementById('show-side').click()")
    assert chat.evaluate(visible) == "visible"
    assert chat.evaluate("document.activeElement.id") == "new"
    chat.evaluate("document.getElementById('hide-side').click()")
    assert chat.evaluate(visible) == "hidden"
    chat.resize(1280, 900, False)


def long_answer(browser: Browser) -> str:
    """Ask for an answer of many tokens; return all of its text."""
    set_value(browser, "max_tokens", "1500")
    say(browser, "Tell me a story.")
    wait_answers(browser, 1)
    (text,) = texts(browser, ".assistant .text")
    click(browser, "New chat")
    return text


def test_an_answer_goes_on_after_a_reload_and_is_stopped_by_its_button(chat: Browser, url: str) -> None:
    whole = long_answer(chat)
    say(chat, "Tell me a story.")
    wait_for(chat, "document.querySelector('.assistant .text')?.textContent.length > 20")
    assert chat.evaluate("!document.getElementById('stop').hidden"), "the answer still comes"
    chat.evaluate("window.isOld = true; location.reload()")
    wait_for(chat, "!window.isOld && " + READY["chat"])
    wait_answers(chat, 1)
    assert texts(chat, ".assistant .text") == [whole]
    say(chat, "And another.")
    wait_for(chat, "document.querySelectorAll('.assistant').length === 2")
    click(chat, "Stop")
    wait_answers(chat, 2)


def test_an_answer_goes_on_after_the_network_was_lost(chat: Browser) -> None:
    whole = long_answer(chat)
    chat.evaluate(
        "(() => { const plain = window.fetch; let count = 0; window.fetch = async (path, options) => { count += 1; "
        "if (count === 2) throw new TypeError('Failed to fetch'); const answer = await plain(path, options); "
        "if (count > 3) return answer; let parts = 0; const torn = answer.body.pipeThrough(new TransformStream({"
        "transform(part, out) { parts += 1; if (parts > 3) out.error(new TypeError('network error')); "
        "else out.enqueue(part); }})); window.numAsked = () => count; "
        "return new Response(torn, {status: answer.status, headers: answer.headers}); }; })()"
    )
    say(chat, "Tell me a story.")
    wait_answers(chat, 1)
    assert texts(chat, ".assistant .text") == [whole]
    assert chat.evaluate("window.numAsked()") >= 3, "the request, one that fails, and the one that reads on"
