"""engine-launch batch: a continued run repeats and loses no request."""

from __future__ import annotations

import fcntl
import http.server
import io
import json
import random
import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.cli.batches.direct_run import LONGEST_WAIT_S, NUM_TRIES, Server, run_line
from tokenloom.frontend.cli.batches.line_files import RequestFile, read_done
from tokenloom.frontend.cli.batches.stored_run import Upload
from tokenloom.frontend.cli.command import load_command
from tokenloom.frontend.forms.openai.batches.line import BatchLine
from tokenloom.ipc.errors import ConfigError

BATCH = load_command("batch")


def answer(custom_id: str, status: int = 200) -> bytes:
    response = {"status_code": status, "request_id": "", "body": None}
    line = {"id": "batch_req_0", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def request(custom_id: str, url: str = "/v1/completions", **fields: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "x"} | fields}) + "\n"


class AnswersServer(http.server.ThreadingHTTPServer):
    """Server that gives the answers of a list in order, the last one again and again, and counts requests."""

    daemon_threads = True

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.num_asked = list(answers), 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: AnswersServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, body = self.server.answers[min(self.server.num_asked, len(self.server.answers) - 1)]
        self.server.num_asked += 1
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def run(*answers: tuple[int, bytes], sleep: Callable[[float], None] = time.sleep) -> tuple[int, Any]:
    """Run a line against a server with these answers; return how often it was asked, and the line of OUT."""
    line = BatchLine(custom_id="a", url="/v1/completions", body=msgspec.Raw(b'{"prompt":"x"}'))
    with AnswersServer(*answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            written = run_line(line, Server(server.url, None), sleep)
        finally:
            server.shutdown()
            thread.join(10)
    assert written.count(b"\n") == 1 and written.endswith(b"\n")
    return server.num_asked, json.loads(written)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"data: {}\n\ndata: [DONE]\n\n", "status 200 with .*, which is not JSON"),
        (200, "Grüße".encode("latin-1"), "which is not JSON"),
        (200, b"[" * 100_000, "which is not JSON"),
        (404, b"<html>", "status 404 with .*, which is not JSON"),
        (413, b"", "status 413"),
    ],
)
def test_an_answer_that_has_come_is_not_asked_for_again(status: int, body: bytes, message: str) -> None:
    num_asked, line = run((status, body))
    assert num_asked == 1 and line["response"]["status_code"] == status
    assert line["error"]["code"] == str(status) and re.search(message, line["error"]["message"])


@pytest.mark.parametrize("status", [400, 500])
def test_an_error_of_the_engine_is_the_answer_as_in_the_files_of_a_batch(status: int) -> None:
    num_asked, line = run((status, b'{"error": {"message": "n is too large"}}'))
    assert num_asked == 1 and line["error"] is None
    assert line["response"]["status_code"] == status
    assert line["response"]["body"]["error"]["message"] == "n is too large"


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_engine_is_asked_a_bounded_number_of_times(status: int) -> None:
    waits: list[float] = []
    num_asked, line = run((status, b"{}"), sleep=waits.append)
    assert num_asked == NUM_TRIES == len(waits) + 1 and line["response"]["status_code"] == status
    assert max(waits) <= LONGEST_WAIT_S
    num_asked, line = run((status, b"{}"), (200, b'{\r\n  "id": "x"\n}\n'), sleep=waits.append)
    assert (num_asked, line["error"], line["response"]["body"]) == (2, None, {"id": "x"})


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \t\n"])
def test_marks_of_editors_and_blank_lines_are_no_requests(begin: str, end: str, tmp_path: Path) -> None:
    text = begin + request("a").strip() + end + request("b", stream=False, pad="x" * 1_000_000).strip()
    (tmp_path / "in").write_bytes(text.encode())
    with closing(RequestFile(tmp_path / "in")) as requests:
        assert requests.custom_ids == ["a", "b"] == [requests.line(index).custom_id for index in (0, 1)]
        assert requests.raw(0) == request("a").strip().encode() and requests.num_bytes(0) == len(requests.raw(0))
        (tmp_path / "in").write_bytes(b" " + text.encode())
        with pytest.raises(ConfigError, match="has changed since it was checked"):
            requests.line(1)


def test_a_large_file_of_requests_is_not_held_in_memory(tmp_path: Path) -> None:
    lines = [request(f"{number}", pad="x" * 100_000) for number in range(200)]
    (tmp_path / "in").write_text("".join(lines))
    tracemalloc.start()
    try:
        with closing(RequestFile(tmp_path / "in")) as requests:
            upload = Upload(requests, range(len(requests)))
            num_bytes = sum(map(len, upload))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes == upload.num_bytes > 20_000_000 > 10 * peak


def test_an_incomplete_last_line_is_cut_off_at_any_length_and_errors_count_as_done() -> None:
    rng = random.Random(3)
    status = {name: rng.choice([200, 400]) for name in "abcdef"}
    whole = [answer(name, code) for name, code in status.items()]
    data = b"".join(whole)
    for cut in range(len(data) + 1):
        num_whole = data[:cut].count(b"\n")
        output = io.BytesIO(data[:cut])
        assert read_done(output) == {name: status[name] == 400 for name in "abcdef"[:num_whole]}
        output.write(answer("next"))
        assert output.getvalue() == b"".join(whole[:num_whole]) + answer("next")


def test_a_file_without_responses_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in (b"my notes\n", b"my notes", answer("a") + b"my notes", b"{}\n"):
        path.write_bytes(text)
        with open(path, "ab+") as output, pytest.raises(ConfigError, match="is not a response"):
            read_done(output)
        assert path.read_bytes() == text


@pytest.mark.parametrize(
    "text, reason",
    [
        (request("a") + request("a"), "is not unique"),
        (request("a", "/v1/files"), "is not served"),
        (request("a") + "{", ":2 is not a batch request"),
        ('{"custom_id": "a"}\n', ":1 is not a batch request"),
        (request("a") + request("b", stream=True), ":2 is not .*: stream is true, .*leave it out"),
        (request("a", "/v1/responses", background=True), ":1 is not .*: background is true, .*leave it out"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": []}', ":1 is not a batch request"),
        (
            '{"custom_id": "a", "url": "/v1/completions", "body": {}, "method": "GET"}',
            ":1 is not .*: method is 'GET': it must be POST",
        ),
        (request("a") + "[" * 100_000, ":2 is not a batch request"),
        ('{"custom_id": "\udcff"}', ":1 is not a batch request"),
    ],
)
def test_an_invalid_line_is_refused_before_any_request_runs(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=reason):
        RequestFile(path)
    assert BATCH.main([str(path), str(tmp_path / "out.jsonl")]) == 2
    assert not (tmp_path / "out.jsonl").exists()


def main(tmp_path: Path, output: str = "out") -> int:
    return BATCH.main([str(tmp_path / "in"), str(tmp_path / output), "--url", "http://127.0.0.1:1"])


def test_an_output_that_is_a_file_of_requests_or_another_batchs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(request("a"))
    (tmp_path / "copy").write_text(request("a"))
    assert main(tmp_path, "in") == 2
    assert "is the file of the requests" in capsys.readouterr().err
    assert main(tmp_path, "copy") == 2
    assert (tmp_path / "in").read_text() == (tmp_path / "copy").read_text() == request("a")
    with open(tmp_path / "out", "wb") as output:
        fcntl.flock(output, fcntl.LOCK_EX)
        assert main(tmp_path) == 2
    assert "another batch is writing" in capsys.readouterr().err
    assert main(tmp_path) == 2, "there is no engine"
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert (tmp_path / "out").read_bytes() == b""


def test_a_finished_batch_starts_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(request("a") + "\n" + request("b"))
    (tmp_path / "out").write_bytes(answer("b") + answer("a"))
    assert main(tmp_path) == 0
    assert "requests: 2, with errors: 0" in capsys.readouterr().err
