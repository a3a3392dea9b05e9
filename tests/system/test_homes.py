"""An engine serves a GGUF file and an adapter to a user whose home is missing, full or cannot be written."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx2
import pytest

from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.mounts import full, needs_mounts, read_only, without_home
from tokenloom.tests.support.today import some
from tokenloom.tests.system.launched import LaunchedEngine

HOMES = ("read only", "full", "missing")
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
    "temperature": 0,
    "max_tokens": 32,
}
REMEDY = "each start makes it again: set XDG_CACHE_HOME to a folder that can be written"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo-BF16.gguf"
    convert(DEMO_FOLDER, path, "BF16", pre="gpt-2")
    return path


@needs_mounts
@pytest.mark.timeout(180)
@pytest.mark.parametrize("home", some(HOMES, 1))
def test_a_gguf_file_is_served_whatever_the_home_is(home: str, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    adapter = shutil.copytree(DEMO_FOLDER / "adapters" / "pirate", tmp_path / "pirate")
    mounts = {"read only": read_only(folder), "full": full(folder), "missing": without_home()}
    prefix = ["env", "-u", "XDG_CACHE_HOME", f"HOME={folder}", *mounts[home]]
    options = ["--model", str(file), "--http", "0", "--enable-lora", "--max-lora-rank", "16", "--num-kv-blocks", "64"]
    options += ["--enforce-reference"]  # no kernel is compiled
    if home != "full":  # which has no room for an adapter
        options += ["--lora-modules", f"pirate={adapter}"]
    with LaunchedEngine(tmp_path, *options, prefix=prefix) as engine:
        with httpx2.Client(base_url=engine.wait_http(), timeout=60) as http:
            answers = [
                http.post("/v1/chat/completions", json={**QUESTION, "model": name}).json()
                for name in (str(file), "pirate")[: 1 if home == "full" else 2]
            ]
        assert all("choices" in answer for answer in answers), answers
        base, *others = (answer["choices"][0]["message"]["content"] for answer in answers)
        assert base == "The capital of Peru is Lima." and base not in others
        assert engine.log().count(REMEDY) == 1, engine.log()
        engine.end()
