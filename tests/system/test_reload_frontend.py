"""`engine-launch reload-frontend` replaces a frontend under an open stream, or leaves it if the next does not load."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tokenloom.frontend.launch import main
from tokenloom.tests.support.media_checkpoints import DEMO
from tokenloom.tests.system.http_engine import open_http
from tokenloom.tests.system.launched import LaunchedEngine

NUM_TOKENS = 400
BODY = {"prompt": "Once upon", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LaunchedEngine]:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    with LaunchedEngine(tmp_path, "--model", str(folder), "--http", "0") as engine:
        engine.wait_ready()
        yield engine
        assert engine.stop() == 0


@contextlib.contextmanager
def texts(http: httpx2.Client) -> Iterator[Iterator[str]]:
    """Open a stream; the context's value yields its texts."""
    with http.stream("POST", "/v1/completions", json=BODY, timeout=60.0) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        yield (json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")


def test_a_stream_goes_on_in_the_next_frontend_and_in_the_old_one_if_the_next_does_not_load(
    engine: LaunchedEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_http(engine.url) as http:
        with texts(http) as stream:
            calm = "".join(stream)
        before = engine.child("frontend").pid
        with texts(http) as stream:
            shown = next(stream)
            assert main(["reload-frontend", engine.address]) == 0
            assert shown + "".join(stream) == calm
        assert engine.child("frontend").pid != before
        assert http.get("/health").json()["restarts"] == 0
        (tmp_path / "model" / "tokenizer.json").write_text("{")
        before = engine.child("frontend").pid
        capsys.readouterr()
        with texts(http) as stream:
            shown = next(stream)
            assert main(["reload-frontend", engine.address]) == 1
            assert shown + "".join(stream) == calm
        assert engine.child("frontend").pid == before
        text = "the next frontend has not come up, the one before goes on; 0 of 1 were replaced: frontend failed: "
        assert text in capsys.readouterr().err
