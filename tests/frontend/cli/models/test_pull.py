"""`pull` fetches a model, says how much and where, and goes on where it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from tokenloom.tests.frontend.cli.models.hub_commands import Run
from tokenloom.tests.support.fake_hub import COMMIT, FakeHub
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 60.0


def test_a_model_is_fetched_with_its_size_its_place_and_the_next_command(
    hub: FakeHub, run: Run, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    code, output, _ = run("pull", "hf.co/org/tiny")
    first, place, then = output.splitlines()
    assert code == 0 and first.startswith("org/tiny: ") and first.endswith(f"MiB, into {tmp_path / 'hub'}")
    assert place == str(snapshot) and then == "now: engine-launch serve hf.co/org/tiny"
    assert (snapshot / "README.md").is_file()
    assert run("pull", "org/tiny")[1].startswith("org/tiny: ") and "all in" in run("pull", "org/tiny")[1]


def test_the_gguf_file_of_the_tag_or_the_usual_one_is_fetched(hub: FakeHub, run: Run) -> None:
    assert "/m-Q8_0.gguf\n" in run("pull", "https://huggingface.co/org/gguf")[1]
    assert "/m-F16.gguf\n" in run("pull", "org/gguf:f16")[1]
    assert len(hub.asked) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("org/none", "org/none: it is neither a folder nor a repository of the hub"),
        ("org/odd", "org/odd has 2 GGUF files: name one, as org/odd:F16: a-F16.gguf, a-Q6_K.gguf"),
        ("org/bin", "org/bin has neither safetensors nor GGUF files, only config.json, pytorch_model.bin"),
        ("llama3:8b", "llama3:8b is a name of Ollama's library, .* hf.co/OWNER/NAME:Q4_K_M"),
        ("nothing", "nothing is neither a path nor a model of the hub: owner/name"),
        ("none.gguf", "none.gguf: there is no such file"),
        ("/dev/null", "/dev/null is here already: engine-launch serve /dev/null"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(name: str, reason: str, hub: FakeHub, run: Run) -> None:
    code, output, said = run("pull", name)
    assert code == 2 and output == "" and said.count("\n") == 1
    assert re.match(f"engine-launch pull: {reason}", said), said


def test_nothing_of_a_gated_repository_is_left(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    hub.gated.add("org/tiny")
    code, _, said = run("pull", "org/tiny")
    assert code == 2 and "licence to be accepted" in said
    assert not (tmp_path / "hub" / "models--org--tiny").exists()


def test_offline_it_says_so(hub: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert run("pull", "org/tiny") == (
        2,
        "",
        "engine-launch pull: HF_HUB_OFFLINE forbids to ask the hub: unset it; engine-launch ls shows what is here\n",
    )


@pytest.mark.usefixtures("no_ignored_signals")
def test_ctrl_c_keeps_what_is_there_and_the_next_pull_asks_for_the_rest(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["org/gguf"] = {"m-Q4_0.gguf": bytes(300_000)}
    hub.holds["m-Q4_0.gguf"] = 200_000
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-P", "-m", "tokenloom.frontend.launch", "pull", "org/gguf"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as pulling:
        blobs = tmp_path / "hub" / "models--org--gguf" / "blobs"
        wait_until(lambda: [each.stat().st_size for each in blobs.glob("*")] == [200_000], timeout_s=DEADLINE_S)
        pulling.send_signal(signal.SIGINT)
        assert pulling.stderr is not None
        assert "stopped: the same command goes on from here" in pulling.stderr.read()
        assert pulling.wait(DEADLINE_S) == 130
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert "0.3 MiB, 0.1 MiB of them to fetch, into" in done.stdout
    assert hub.ranges("m-Q4_0.gguf") == [None, "bytes=200000-"]
