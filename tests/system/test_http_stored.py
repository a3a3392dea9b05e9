"""Stored responses: retrieved, continued, run in the background, cancelled, dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai

from tokenloom.frontend.state.responses import MAX_RECORD_BYTES
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import KEY, open_http, running
from tokenloom.tests.system.launched import LaunchedEngine

PATH = "/v1/responses"
QUESTION = "What is the capital of Peru?"
LONG = {"input": QUESTION, "background": True, "ignore_eos": True, "temperature": 1, "max_output_tokens": 1500}


def made(http: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"input": QUESTION, "temperature": 0, "max_output_tokens": 12} | body)
    assert answer.status_code == 200 and "warning" not in answer.headers, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wait_state(http: httpx2.Client, response_id: str, is_there: Callable[[str], bool]) -> dict[str, Any]:
    def find() -> dict[str, Any]:
        found: dict[str, Any] = http.get(f"{PATH}/{response_id}").json()
        return found if is_there(found["status"]) else {}

    return wait_until(find)


def ended(http: httpx2.Client, response_id: str) -> dict[str, Any]:
    return wait_state(http, response_id, lambda status: status not in ("queued", "in_progress"))


def begun(http: httpx2.Client, **body: Any) -> str:
    """Start a long background response, wait until it runs, and return its id."""
    response_id = str(made(http, **LONG | body)["id"])
    wait_state(http, response_id, lambda status: status != "queued")
    return response_id


def error(answer: httpx2.Response) -> tuple[int, str, str | None, str | None]:
    body = answer.json()["error"]
    return answer.status_code, body["message"], body["param"], body["code"]


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_a_stored_response_can_be_retrieved_until_it_is_deleted(client: openai.OpenAI, http: httpx2.Client) -> None:
    response = client.responses.create(model="tokenloom-demo", input=QUESTION, temperature=0)
    assert response.to_dict()["store"] is True
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    client.responses.delete(response.id)
    missing = f"Response with id '{response.id}' not found."
    for answer in (http.get(f"{PATH}/{response.id}"), http.delete(f"{PATH}/{response.id}")):
        assert error(answer) == (404, missing, "response_id", None)
    assert http.post(f"{PATH}/{response.id}/cancel").status_code == 404
    assert set(http.put(f"{PATH}/{response.id}").headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    assert http.get(f"{PATH}/{response.id}/input_items").status_code == 404


def test_a_chosen_request_id_neither_replaces_nor_reveals_a_response(http: httpx2.Client) -> None:
    first = made(http, input="my diagnosis is secret-4711", request_id="mine")
    second = made(http, request_id="mine")
    assert first["id"] != second["id"] and http.get(f"{PATH}/{first['id']}").json() == first
    for guess in ("resp_mine", "chatcmpl-mine", "mine", first["id"][:-1], first["id"].replace("resp_", "chatcmpl-")):
        assert http.get(f"{PATH}/{guess}").status_code == http.delete(f"{PATH}/{guess}").status_code == 404
        assert http.post(PATH, json={"input": "Hi", "previous_response_id": guess}).status_code == 400
    items = http.get(f"{PATH}/{first['id']}/input_items").text + json.dumps(first["output"])
    assert first["id"].rpartition("_")[2] not in items, "an item shows no id of its response"
    running = begun(http, request_id="mine")
    refused = http.post(PATH, json=LONG | {"request_id": "mine"})
    assert error(refused)[:2] == (400, "request_id chatcmpl-mine is open already: choose another")
    shown = http.get("/dashboard/data").text
    assert "mine" not in shown and running not in shown
    assert http.post("/abort", json={"request_id": running}).json()["aborted"] == 1


def test_a_response_with_store_false_is_not_stored(http: httpx2.Client) -> None:
    response = made(http, store=False)
    assert response["store"] is False
    assert http.get(f"{PATH}/{response['id']}").status_code == 404
    refused = http.post(PATH, json={"input": "Hi", "background": True, "store": False})
    assert error(refused)[:3] == (400, "background can only be used when `store` is true", "background")
    large = {"input": QUESTION, "metadata": {"x": "a" * MAX_RECORD_BYTES}, "max_output_tokens": 1}
    assert http.post(PATH, json=large).json()["store"] is False
    assert "send less" in error(http.post(PATH, json=large | {"background": True}))[1]
    assert error(http.post(PATH, json={"input": "Hi", "conversation": "conv_1"}))[2] == "conversation"


def test_a_conversation_continues_from_any_of_its_responses(http: httpx2.Client) -> None:
    first = made(http, instructions="Be brief.")
    second = made(http, input=[{"role": "user", "content": "And of Chile?"}], previous_response_id=first["id"])
    third = made(http, input="And of France?", previous_response_id=second["id"])
    assert [second["previous_response_id"], third["previous_response_id"]] == [first["id"], second["id"]]
    by_hand = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "And of Chile?"}]
    again = made(http, input=by_hand, store=False)
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert again["output"][0]["content"] == second["output"][0]["content"]
    listed = http.get(f"{PATH}/{third['id']}/input_items", params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert [texts[0], texts[4]] == [QUESTION, "And of France?"] and len(texts) == 5
    counted = {"input": "And of France?", "previous_response_id": second["id"]}
    assert http.post(f"{PATH}/input_tokens", json=counted).json() == {
        "object": "response.input_tokens",
        "input_tokens": third["usage"]["input_tokens"],
    }


def test_previous_response_id_must_name_a_finished_stored_response(http: httpx2.Client) -> None:
    unknown = http.post(PATH, json={"input": "Hi", "previous_response_id": "resp_0"})
    message = "Previous response with id 'resp_0' not found."
    assert error(unknown) == (400, message, "previous_response_id", "previous_response_not_found")
    running = begun(http)
    early = http.post(PATH, json={"input": "Hi", "previous_response_id": running})
    assert error(early)[::2] == (400, "previous_response_id") and "has not ended" in error(early)[1]
    http.post(f"{PATH}/{running}/cancel")


def test_input_items_are_paged(client: openai.OpenAI, http: httpx2.Client) -> None:
    turns: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    response = client.responses.create(model="tokenloom-demo", input=turns, max_output_tokens=1)
    pages = client.responses.input_items.list(response.id, limit=2, order="asc")
    texts: list[Any] = [item.to_dict()["content"] for item in pages]
    assert texts == [[{"type": "input_text", "text": text}] for text in "01234"]
    newest = http.get(f"{PATH}/{response.id}/input_items?limit=2").json()
    assert [item["content"][0]["text"] for item in newest["data"]] == ["4", "3"] and newest["has_more"]
    for query in ("limit=0", "limit=x", "after=nothing", "order=up"):
        assert http.get(f"{PATH}/{response.id}/input_items?{query}").status_code == 400


def test_a_background_response_equals_a_synchronous_one(http: httpx2.Client) -> None:
    queued = made(http, background=True)
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    found, direct = ended(http, queued["id"]), made(http)
    assert found["status"] == direct["status"]
    for counts in ("input_tokens", "output_tokens"):  # less the drafts: answers that ended before give others
        assert found["usage"][counts] == direct["usage"][counts]
    assert found["output"][0]["content"] == direct["output"][0]["content"]
    assert error(http.get(f"{PATH}/{queued['id']}?stream=true"))[2] == "stream"


def test_a_background_response_stays_cancelled(http: httpx2.Client) -> None:
    begun_id = begun(http)
    for _ in range(2):
        assert http.post(f"{PATH}/{begun_id}/cancel").json()["status"] == "cancelled"
    assert http.get(f"{PATH}/{begun_id}").json()["status"] == "cancelled"
    wait_until(lambda: not running(http))
    direct = made(http)
    refused = http.post(f"{PATH}/{direct['id']}/cancel")
    assert error(refused)[:2] == (400, "Cannot cancel a synchronous response.")
    assert http.delete(f"{PATH}/{begun(http)}").json()["deleted"] is True


def test_a_killed_frontend_loses_no_accepted_response(engine: LaunchedEngine, http: httpx2.Client) -> None:
    kept = made(http)
    plain = begun(http, max_output_tokens=500)
    with http.stream("POST", PATH, json=LONG | {"stream": True, "max_output_tokens": 500}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        seen = [json.loads(next(lines).removeprefix("data: ")) for _ in range(40)]
        engine.child("frontend").kill()
    response_id = seen[0]["response"]["id"]
    with open_http(engine.url, KEY) as again:
        assert again.get(f"{PATH}/{kept['id']}").json() == kept
        follow = {"stream": "true", "starting_after": str(seen[-1]["sequence_number"])}
        rest = events(again.get(f"{PATH}/{response_id}", params=follow).text)
        everything = seen + rest
        assert [event["sequence_number"] for event in everything] == list(range(len(everything)))
        deltas = "".join(event["delta"] for event in everything if event["type"] == "response.output_text.delta")
        final = ended(again, response_id)
        assert rest[-1]["response"] == final and final["status"] == "incomplete"
        assert deltas == final["output"][0]["content"][0]["text"]
        assert final["usage"]["output_tokens"] == 500
        assert {event["item_id"] for event in everything if "item_id" in event} == {final["output"][0]["id"]}
        assert ended(again, plain)["usage"]["output_tokens"] == 500


def test_a_streamed_response_is_stored_before_its_last_event(http: httpx2.Client) -> None:
    streamed = events(http.post(PATH, json={"input": QUESTION, "stream": True, "max_output_tokens": 8}).text)
    assert http.get(f"{PATH}/{streamed[-1]['response']['id']}").json() == streamed[-1]["response"]


def test_a_large_turn_continues_a_conversation(http: httpx2.Client) -> None:
    first = made(http)
    more = {"truncate_prompt_tokens": 40, "metadata": {"x": "a" * (200 << 10)}}
    second = made(http, input="And of Chile?", previous_response_id=first["id"], **more)
    by_hand = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "And of Chile?"}]
    assert made(http, input=by_hand, **more)["output"][0]["content"] == second["output"][0]["content"]


def test_a_failed_background_response_reports_its_error(http: httpx2.Client) -> None:
    found = ended(http, made(http, background=True, input="1 2 " * 3000)["id"])
    assert found["status"] == "failed" and found["error"]["code"] == "invalid_prompt"
    assert "too long" in found["error"]["message"]
