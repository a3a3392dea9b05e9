"""HTTP access to a running engine: sockets that outlive frontends, admin endpoints, the access log, cut requests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tokenloom import Client
from tokenloom.frontend.server.bodies.body_parser import SMALL_BYTES
from tokenloom.scripts.chaos import http_kills
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.equipped_engine import MAX_BODY_BYTES, ROOT, EquippedEngine
from tokenloom.tests.system.http_engine import DEADLINE_S, ask, open_http, samples

CUT = "tokenloom_http_answers_cut_total{unix}"
RESUMED = "tokenloom_http_answers_resumed_total"
LONG = {  # for seconds: guesses of random answers are wrong
    "prompt": "The capital of France is",
    "max_tokens": 900,
    "ignore_eos": True,
    "temperature": 1.5,
    "n": 8,
    "stream": True,
}


def port_of(engine: EquippedEngine) -> int:
    return int(engine.url.rpartition(":")[2])


def unix(engine: EquippedEngine) -> httpx2.Client:
    transport = httpx2.HTTPTransport(uds=str(engine.socket), verify=False)
    return httpx2.Client(base_url="http://engine", transport=transport, timeout=DEADLINE_S, verify=False)


def wait_log(engine: EquippedEngine, pattern: str) -> str:
    """Wait for the first log line with the pattern; the supervisor writes it later than the event."""
    return wait_until(lambda: re.search(f".*{pattern}.*", engine.errors.read_text()), f"{pattern} is not logged")[0]


def wait_status(http: httpx2.Client, status: str) -> None:
    """Wait until /health reports `status`: the core's state arrives later than its answer to the call."""
    wait_until(lambda: http.get("/health").json()["status"] == status)


def test_a_port_in_use_is_reported_before_torch_is_imported_and_leaves_nothing(
    equipped: EquippedEngine, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom tokenloom.frontend import launch\n"
        "print(launch.main(sys.argv[1:]), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code, "--http", str(port_of(equipped))]
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd="/", check=True)
    assert done.stdout.split() == ["2", "False", "False"]
    assert done.stderr.splitlines() == [
        f"engine-launch: cannot listen on port {port_of(equipped)} of 127.0.0.1: Address already in use; "
        "choose another with --http"
    ]
    assert [path.name for path in (tmp_path / "tokenloom").iterdir()] == [".lock"]


def test_paths_are_served_below_the_root_path_and_without_it(door: httpx2.Client, equipped: EquippedEngine) -> None:
    for prefix in ("", ROOT):
        assert door.get(f"{prefix}/v1/models").status_code == 200
        assert door.get(f"{prefix}/").headers["location"] == f"{ROOT}/dashboard"
    assert door.get("/openapi.json").json()["servers"] == [{"url": ROOT}]
    with unix(equipped) as other:
        assert other.get("/v1/models").status_code == 200


def cut_within(engine: EquippedEngine, client: httpx2.Client) -> None:
    """Kill the frontend within a stream, and read the rest of it."""
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine.child("frontend").kill()
        list(lines)


def test_a_killed_frontend_cuts_no_stream_and_refuses_no_connection(
    equipped: EquippedEngine, door: httpx2.Client
) -> None:
    before = samples(door)[RESUMED]
    with door.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        report = http_kills.measure(equipped, seconds=1.5, num_kills=1, rate=100.0)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert http_kills.is_clean(report), report
    assert report["kills"] == 1 and report["answered"] > 100  # type: ignore[operator]
    with open_http(equipped.url) as again:  # the port is the same
        assert samples(again)[RESUMED] - before >= 1
    with unix(equipped) as other, pytest.raises(httpx2.HTTPError):
        cut_within(equipped, other)
    with open_http(equipped.url) as again:
        wait_until(lambda: samples(again)[CUT] >= 1)  # the supervisor tells the counts
        assert again.get("/dashboard/data").json()["requests_cut"] >= 1


def test_admin_endpoints_do_the_same_as_the_library_calls(
    equipped: EquippedEngine, door: httpx2.Client, tmp_path: Path
) -> None:
    assert "--data-parallel-size 2" in door.post("/restart_replicas").json()["error"]["message"]
    assert door.post("/pause", json={"mode": "wait"}).json() == {"paused": "wait"}
    wait_status(door, "paused")
    with Client(equipped.address, key_file=equipped.key_file) as client:
        assert client.health().is_paused
    assert door.post("/resume").json() == {"paused": None}
    wait_status(door, "ok")
    folder = door.get("/v1/models").json()["data"][0]["root"]
    assert door.post("/reload", json={"model": folder}).json() == {"model": folder}
    for path, body in (
        ("pause", {"mode": "so"}),
        ("resume", {"x": 1}),
        ("reload", {"model": str(tiny_checkpoint(tmp_path / "other"))}),
        ("log_level", {"level": "x"}),
    ):
        assert door.post(f"/{path}", json=body).status_code == 400


def test_vllms_endpoints_sleep_wake_and_reset_the_prefix_cache(door: httpx2.Client) -> None:
    def cached() -> int:
        usage = ask(door, "/v1/completions", prompt="The capital of France is Paris. " * 4, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert door.post("/reset_prefix_cache").status_code == 200 and cached() == 0
    for query, is_awake in (("?tags=weights&tags=kv_cache", True), ("?tags=weights", False)):
        assert door.post("/sleep?level=2").status_code == 200
        assert door.get("/is_sleeping").json() == {"is_sleeping": True}
        assert door.get("/health").json()["status"] == "asleep"
        assert door.post(f"/wake_up{query}").json() == {"is_sleeping": not is_awake}
    assert door.post("/wake_up").json() == {"is_sleeping": False} and cached() == 0
    for path in ("sleep?level=3", "sleep?level=x", "sleep?mode=x", "wake_up?tags=x"):
        assert door.post(f"/{path}").status_code == 400, path


def test_a_log_level_reaches_current_and_later_processes(equipped: EquippedEngine, door: httpx2.Client) -> None:
    assert door.get("/log_level").json() == {"level": "info"}
    assert door.post("/log_level", json={"level": "error"}).json() == {"level": "error"}
    equipped.child("frontend").kill()
    with open_http(equipped.url) as again:
        assert again.get("/log_level", headers={"x-request-id": "unseen"}).json() == {"level": "error"}
        with Client(equipped.address, key_file=equipped.key_file) as client:
            client.set_log_level("info")
        assert again.get("/log_level", headers={"x-request-id": "seen"}).json() == {"level": "info"}
    wait_log(equipped, "id seen")
    assert "id unseen" not in equipped.errors.read_text()


def test_a_body_that_is_too_large_is_refused_and_counted(door: httpx2.Client) -> None:
    def count() -> float:
        return samples(door).get("tokenloom_requests_refused_total{size}", 0)

    before, whole = count(), b'{"prompt": "' + b"x" * MAX_BODY_BYTES
    in_chunks = iter([whole[: MAX_BODY_BYTES // 2 + 1]] * 2)
    for path, content in (("completions", whole), ("completions", in_chunks), ("messages", whole)):
        answer = door.post(f"/v1/{path}", content=content)
        assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large", "Anthropic's form"
    assert count() == before + 3


def test_with_strict_fields_unknown_fields_are_refused_by_name(door: httpx2.Client) -> None:
    for padding in (b"", b" " * SMALL_BYTES):
        answer = door.post("/v1/completions", content=padding + b'{"prompt": "x", "temprature": 1}')
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "temprature", "unknown_field")
    assert door.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


def test_a_request_may_bring_a_template_if_the_operator_allows_it(door: httpx2.Client) -> None:
    template = "{{ documents[0].text }} and {{ messages[0].content }}"
    body = {"messages": [{"role": "user", "content": "Peru"}], "chat_template": template, "max_tokens": 1}
    body |= {"documents": [{"text": "France"}], "return_token_ids": True}
    for padding in (b"", b" " * SMALL_BYTES):
        answer = door.post("/v1/chat/completions", content=padding + json.dumps(body).encode()).json()
        assert "error" not in answer, answer
        assert door.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json() == {
            "prompt": "France and Peru"
        }
