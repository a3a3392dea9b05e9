"""engine-launch batch: a continued run repeats and loses no request."""

from __future__ import annotations

import fcntl
import json
import random
from pathlib import Path

import pytest

from tokenloom.frontend.cli.batch import read_done, read_lines
from tokenloom.frontend.cli.command import load_command
from tokenloom.ipc.errors import ConfigError

BATCH = load_command("batch")


def answer(custom_id: str, status: int = 200) -> bytes:
    response = {"status_code": status, "request_id": "", "body": None}
    line = {"id": "batch_req_0", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def request(custom_id: str, url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "x"}}) + "\n"


def test_an_incomplete_last_line_is_cut_off_at_any_length(tmp_path: Path) -> None:
    path, rng = tmp_path / "out.jsonl", random.Random(3)
    whole = [answer(name, rng.choice([200, 400])) for name in "abcdef"]
    data = b"".join(whole)
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        num_whole = data[:cut].count(b"\n")
        with open(path, "ab+") as output:
            done = read_done(output)
            output.write(answer("next"))
        assert list(done) == list("abcdef")[:num_whole]
        assert path.read_bytes() == b"".join(whole[:num_whole]) + answer("next")


def test_a_file_without_responses_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in (b"my notes\n", b"my notes", answer("a") + b"my notes", b"{}\n"):
        path.write_bytes(text)
        with open(path, "ab+") as output, pytest.raises(ConfigError, match="is not a response"):
            read_done(output)
        assert path.read_bytes() == text


def test_requests_with_errors_count_as_done(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("good") + answer("bad", 400))
    with open(path, "ab+") as output:
        assert read_done(output) == {"good": False, "bad": True}


@pytest.mark.parametrize(
    "text, reason",
    [
        (request("a") + request("a"), "is not unique"),
        (request("a", "/v1/files"), "is not served"),
        (request("a") + "{", ":2 is not a batch request"),
        ('{"custom_id": "a"}\n', ":1 is not a batch request"),
    ],
)
def test_an_invalid_line_is_refused_before_any_request_runs(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_lines(path)
    assert BATCH.main([str(path), str(tmp_path / "out.jsonl")]) == 2
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_of_requests_is_refused_as_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(request("a"))
    (tmp_path / "copy").write_text(request("a"))
    assert BATCH.main([str(tmp_path / "in"), str(tmp_path / "in")]) == 2
    assert "is the file of the requests" in capsys.readouterr().err
    assert BATCH.main([str(tmp_path / "in"), str(tmp_path / "copy")]) == 2
    assert (tmp_path / "in").read_text() == (tmp_path / "copy").read_text() == request("a")


def test_two_batches_cannot_write_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(request("a"))
    with open(tmp_path / "out", "wb") as output:
        fcntl.flock(output, fcntl.LOCK_EX)
        assert BATCH.main([str(tmp_path / "in"), str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]) == 2
    assert "another batch is writing" in capsys.readouterr().err


def test_an_unreachable_engine_is_an_error_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(request("a"))
    assert BATCH.main([str(tmp_path / "in"), str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert (tmp_path / "out").read_bytes() == b""


def test_a_finished_batch_starts_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(request("a") + "\n" + request("b"))
    (tmp_path / "out").write_bytes(answer("b") + answer("a"))
    assert BATCH.main([str(tmp_path / "in"), str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]) == 0
    assert "requests: 2, with errors: 0" in capsys.readouterr().err
