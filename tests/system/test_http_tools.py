"""Third-party tools check the HTTP server: promtool, Prometheus, schemathesis; each is skipped if not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from tokenloom.tests.support.media_checkpoints import DEMO
from tokenloom.tests.system.launched import LaunchedEngine, served
from tokenloom.tests.system.prometheus import Prometheus

DASHBOARDS = Path(__file__).parents[2] / "docs/operate/dashboards"
DEADLINE_S = 30.0
PANELS_S = 90.0


engine = served("--http", "0")


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(*command: str, text: str = "", timeout_s: float = DEADLINE_S) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


@needs("promtool")
def test_every_alert_fires_on_its_fault_and_none_without() -> None:
    assert "11 rules found" in run("promtool", "check", "rules", str(DASHBOARDS / "alerts.yml"))
    assert "SUCCESS" in run("promtool", "test", "rules", str(DASHBOARDS / "alerts_test.yml"))


@pytest.mark.nightly
@needs("promtool")
def test_promtool_accepts_the_metrics(url: str) -> None:
    httpx2.post(f"{url}/v1/completions", json={"prompt": "The", "max_tokens": 3}, timeout=DEADLINE_S)
    assert run("promtool", "check", "metrics", text=httpx2.get(f"{url}/metrics").text) == ""


def cause_what_is_counted(url: str) -> None:
    """Cause every counted event: an answer of several steps, some with adapters, a rejected one, a late one and an
    abandoned one."""
    body = {"prompt": "The", "ignore_eos": True, "max_tokens": 40}
    adapted = [{"model": name} for name in ("json", "pirate")]  # of which the only slot holds one
    for change in ({}, *adapted, {"prompt": [5] * 3000}, {"timeout_s": 0.05, "max_tokens": 2000}):
        httpx2.post(f"{url}/v1/completions", json=body | change, timeout=DEADLINE_S)
    with httpx2.stream("POST", f"{url}/v1/completions", json=body | {"stream": True, "max_tokens": 2000}) as answer:
        next(answer.iter_lines())


@pytest.mark.nightly
@needs("prometheus")
def test_every_grafana_panel_has_data_after_prometheus_scrapes_the_engine(tmp_path: Path) -> None:
    adapters = [f"{name}={DEMO / 'adapters' / name}" for name in ("json", "pirate")]
    options = ("--enable-lora", "--max-loras", "1", "--lora-modules", *adapters, "--kv-disk", str(tmp_path / "kv"))
    with LaunchedEngine(tmp_path, "--http", "0", *options) as engine:
        check_panels(engine.wait_http(), tmp_path)


def check_panels(url: str, tmp_path: Path) -> None:
    panels = json.loads((DASHBOARDS / "grafana.json").read_text())["panels"]
    queries = {(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]}
    wanted = {query for query in queries if "tokenloom_tier_rejected_total" not in query[1]}  # none is, of a whole disk
    with Prometheus(tmp_path, [url], (DASHBOARDS / "alerts.yml").read_text()) as prometheus:
        deadline = time.monotonic() + PANELS_S
        while wanted:
            assert time.monotonic() < deadline, f"these have no data: {sorted(wanted)}"
            cause_what_is_counted(url)  # again: a rate needs samples before and after
            for title, expression in sorted(wanted):
                found = prometheus.query(expression.replace("$__rate_interval", "30s").replace("$model", ".*"))
                if any(sample["value"][1] != "NaN" for sample in found):
                    wanted.discard((title, expression))


OPTIONS = ("--max-examples", "60", "--request-timeout", "100")  # an answer may be as long as max_model_len
ORDERS = "pause|resume|reload|log_level|sleep|wake_up|start_profile|stop_profile"  # a sleeping engine answers nothing
OPTIONS += (
    "--exclude-path-regex",
    f"^/(ping|v1/responses/input_tokens|{ORDERS})$",
)  # a ping's body is not read; the other endpoint reads only the prompt
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed")
@pytest.mark.parametrize(
    "checks",
    [
        ["--exclude-checks", "positive_data_acceptance"],
        # requests allowed by the schema succeed, apart from the exceptions in clients/schemathesis_hooks.py
        ["--checks", "positive_data_acceptance"],
    ],
    ids=["faults", "acceptance"],
)
def test_schemathesis_finds_no_fault(url: str, checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "--checks" in checks:
        monkeypatch.setenv("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "clients"))
    run(str(SCHEMATHESIS), "run", f"{url}/openapi.json", *OPTIONS, *checks, timeout_s=800)
