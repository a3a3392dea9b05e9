"""A state folder outlives every process of its engine, and the next start with it goes on."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.http_engine import DEADLINE_S, KEY, open_http, open_openai, samples
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.test_http_stored import LONG, PATH, begun, ended, events, made

MAX_BODY_BYTES = 100_000  # so that the rest of a larger upload is lost with its frontend
UPLOAD_HEAD = b'--bb\r\nContent-Disposition: form-data; name="file"; filename="half"\r\n\r\n'
LINES = b'{"custom_id": "a"}\n' * 20_000
CAN_MOUNT = subprocess.run(
    ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False, timeout=30
)


def launched(runtime: Path, folder: Path, *options: str, prefix: tuple[str, ...] = ()) -> LaunchedEngine:
    command = ("--http", "0", "--api-key", KEY, "--state-dir", str(folder), "--max-body-bytes", str(MAX_BODY_BYTES))
    return LaunchedEngine(runtime, *command, *options, prefix=prefix)


def half_upload(url: str) -> socket.socket:
    """Begin an upload of which the rest does not come."""
    place = urlsplit(url)
    fields = ("host: x", f"authorization: Bearer {KEY}", "content-length: 9999999")
    kind = "content-type: multipart/form-data; boundary=bb"
    connection = socket.create_connection((place.hostname, place.port or 80), timeout=DEADLINE_S)
    connection.sendall("\r\n".join(("POST /v1/files HTTP/1.1", *fields, kind, "", "")).encode() + UPLOAD_HEAD)
    connection.sendall(bytes(10 * MAX_BODY_BYTES))
    return connection


def kill_everything(engine: LaunchedEngine) -> None:
    for process in engine.processes():
        process.kill()


def test_files_and_responses_go_on_after_a_kill_of_every_process(tmp_path: Path) -> None:
    files = tmp_path / "state" / "files"
    with launched(tmp_path, tmp_path / "state", "--api-server-count", "2") as engine:
        engine.wait_ready()
        with open_openai(engine.url, KEY) as client:
            kept_file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
        with open_http(engine.url, KEY) as http, half_upload(engine.url):
            kept = made(http)
            body = LONG | {"seed": 7, "stream": True, "max_output_tokens": 300}
            with http.stream("POST", PATH, json=body) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith("data: "))
                seen = events("\n".join(next(lines) for _ in range(40)))
                wait_until(lambda: any(path.name.endswith(".part") for path in files.iterdir()))
                kill_everything(engine)
        engine.start_again()
        held = [each.path for each in engine.child("frontend").open_files()]
        assert str(tmp_path / "state" / "lock") in held, "it outlives the supervisor with the frontend"
        with open_http(engine.url, KEY) as http:
            assert http.get(f"{PATH}/{kept['id']}").json() == kept
            follow = {"stream": "true", "starting_after": str(seen[-1]["sequence_number"])}
            everything = seen + events(http.get(f"{PATH}/{seen[0]['response']['id']}", params=follow).text)
            assert [event["sequence_number"] for event in everything] == list(range(len(everything)))
            deltas = "".join(event["delta"] for event in everything if event["type"] == "response.output_text.delta")
            calm = made(http, **body | {"background": False, "stream": False})
            assert deltas == calm["output"][0]["content"][0]["text"]
            shown = samples(http)
            assert shown["tokenloom_state_files"] == 1 and shown["tokenloom_state_file_bytes"] == len(LINES)
            assert http.get("/dashboard/data").json()["state_folder"]["num_responses"] == 3
        with open_openai(engine.url, KEY) as client:
            assert client.files.content(kept_file.id).content == LINES
        wait_until(lambda: [path.name for path in files.iterdir()] == [kept_file.id], "the half upload is left")
        engine.end()


@pytest.mark.nightly
def test_a_response_of_another_model_ends_with_an_error(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("served-model-name: old")
    with launched(tmp_path, tmp_path / "state", "--config", str(config)) as engine:
        engine.wait_ready()
        with open_http(engine.url, KEY) as http:
            response_id = begun(http)
        kill_everything(engine)
        config.write_text("served-model-name: new")
        engine.start_again()
        with open_http(engine.url, KEY) as http:
            found = ended(http, response_id)
        assert found["status"] == "failed"
        assert "the model old that began this response is not served now" in found["error"]["message"]
        engine.end()


def uploaded(http: httpx2.Client, num_bytes: int) -> tuple[int, Any]:
    answer = http.post("/v1/files", files={"purpose": (None, "user_data"), "file": ("a", bytes(num_bytes))})
    return answer.status_code, answer.json()


@pytest.mark.nightly
@pytest.mark.skipif(CAN_MOUNT.returncode != 0, reason="this machine allows no mount in a user namespace")
def test_a_full_disk_is_a_507_and_the_engine_goes_on(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    mount = f'mount -t tmpfs -o size=24m tmpfs {tmp_path}/state && exec "$@"'
    prefix = ("unshare", "-rm", "sh", "-c", mount, "sh")
    with launched(tmp_path, tmp_path / "state", prefix=prefix) as engine:
        engine.wait_ready()
        with open_http(engine.url, KEY) as http:
            status, kept = uploaded(http, 1 << 20)
            assert status == 200
            status, refusal = uploaded(http, 16 << 20)
            assert status == 507 and refusal["error"]["code"] == "storage_full"
            assert refusal["error"]["message"].endswith("free space or choose another folder")
            assert made(http)["output"], "the engine goes on"
            assert [each["id"] for each in http.get("/v1/files").json()["data"]] == [kept["id"]]
            assert uploaded(http, 4 << 20)[0] == 200, "the room of the refused upload is free again"
        engine.end()
