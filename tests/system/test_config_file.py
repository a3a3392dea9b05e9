"""The file of options that docs/operate/install.md gives to the service is served, with the key of its environment."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tokenloom.tests.system.launched import LaunchedEngine

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/operate/deploy/engine.yaml"
KEY = "sk-of-the-environment"
BODY = {"model": "qwen3", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


@pytest.mark.timeout(120)
def test_the_example_serves_under_its_names_and_ends_as_systemd_ends_it(tmp_path: Path) -> None:
    """Only what depends on the machine is replaced: the model with its length, and the port."""
    own = ["--model", "demo", "--max-model-len", "2048", "--host", "127.0.0.1", "--port", "0"]
    more = {"TOKENLOOM_API_KEY": KEY}
    with LaunchedEngine(tmp_path, "--config", str(EXAMPLE), *own, more=more) as engine:
        url = engine.wait_http()
        with httpx2.Client(base_url=url, timeout=60) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 401
            http.headers["authorization"] = f"Bearer {KEY}"
            answer = http.post("/v1/completions", json=BODY).json()
            assert answer["model"] == "qwen3" and "Paris" in answer["choices"][0]["text"]
            options = http.get("/server_info").json()
            assert KEY not in str(options)
        assert engine.stop() == 0
