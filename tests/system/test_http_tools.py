"""What other people's tools say of the HTTP server: promtool, Prometheus, schemathesis, each where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from .launched import LaunchedEngine

DASHBOARDS = Path(__file__).parents[2] / "docs" / "dashboards"
DEADLINE_S = 30.0


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LaunchedEngine(tmp_path_factory.mktemp("tools"), "--http", "0") as engine:
        engine.wait_ready()
        found = re.search(r"http://\S+", next(line for line in engine.lines if line.startswith("Ready")))
        assert found
        yield found.group()


def run(*command: str, text: str = "", timeout_s: float = DEADLINE_S) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@needs("promtool")
def test_every_alert_fires_on_its_fault_and_none_without() -> None:
    assert "7 rules found" in run("promtool", "check", "rules", str(DASHBOARDS / "alerts.yml"))
    assert "SUCCESS" in run("promtool", "test", "rules", str(DASHBOARDS / "alerts_test.yml"))


@pytest.mark.slow
@needs("promtool")
def test_promtool_finds_nothing_to_say_of_the_metrics(url: str) -> None:
    httpx2.post(f"{url}/v1/completions", json={"prompt": "The", "max_tokens": 3}, timeout=DEADLINE_S)
    assert run("promtool", "check", "metrics", text=httpx2.get(f"{url}/metrics").text) == ""


@pytest.mark.slow
@needs("prometheus")
def test_a_prometheus_scrapes_the_engine(url: str, tmp_path: Path) -> None:
    targets = [url.removeprefix("http://")]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DASHBOARDS / "alerts.yml")],
        "scrape_configs": [{"job_name": "tokenloom", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    listen = "127.0.0.1:19191"
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address={listen}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline, found = time.monotonic() + DEADLINE_S, []
        while not found:
            assert time.monotonic() < deadline and process.poll() is None
            try:
                answer = httpx2.get(f"http://{listen}/api/v1/query", params={"query": "tokenloom_engine_up"})
                found = answer.json()["data"]["result"]
            except (httpx2.TransportError, KeyError, ValueError):
                continue
        assert [each["value"][1] for each in found] == ["1"]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


OPTIONS = ("--max-examples", "60", "--request-timeout", "100")  # an answer may be as long as the model's length
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed")
@pytest.mark.parametrize(
    "checks",
    [
        ["--exclude-checks", "positive_data_acceptance"],
        # what the schema allows is accepted, but for what no schema can say: clients/schemathesis_hooks.py
        ["--checks", "positive_data_acceptance"],
    ],
    ids=["faults", "acceptance"],
)
def test_schemathesis_finds_no_fault(url: str, checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "--checks" in checks:
        monkeypatch.setenv("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "clients"))
    run(str(SCHEMATHESIS), "run", f"{url}/openapi.json", *OPTIONS, *checks, timeout_s=800)
