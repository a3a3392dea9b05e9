"""`show` tells what a model is, from its files or from the hub."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from tokenloom.tests.frontend.cli.models.hub_commands import Run
from tokenloom.tests.support.fake_hub import FakeHub

ROWS = ["model", "place", "architecture", "parameters", "context", "format", "size", "sampling", "chat template"]
ROWS += ["can", "license", "fits here"]


def rows_of(output: str) -> dict[str, str]:
    """Return the values of the lines by their names, which two spaces end."""
    found: dict[str, str] = {}
    for line in output.split("\n\n")[0].splitlines():
        name, _, value = line.partition("  ")
        found[name] = value.strip()
    return found


def test_a_model_of_the_hub_is_shown_alike_before_and_after_it_is_fetched(hub: FakeHub, run: Run) -> None:
    hub.cards["org/tiny"] = {
        "cardData": {"license": "mit"},
        "safetensors": {"parameters": {"BF16": 194304}, "total": 194304},
    }
    code, output, _ = run("show", "org/tiny")
    before = rows_of(output)
    assert code == 0 and list(before) == ROWS and before["place"] == "on the hub, not fetched"
    assert not any("safetensors" in each.file for each in hub.asked), "no weights are fetched"
    assert run("ls")[1].startswith("no model"), "and nothing is left in the cache"
    assert run("pull", "org/tiny")[0] == 0
    after = rows_of(run("show", "https://hf.co/org/tiny")[1])
    assert "/models--org--tiny/" in after.pop("place") and before.pop("place")
    assert before.pop("fits here").split()[0] == after.pop("fits here").split()[0] == "yes,"
    assert after == before
    assert after["license"] == "mit" and after["parameters"] == "194304"


def test_the_gguf_files_of_a_repository_are_listed_and_the_one_that_is_taken(hub: FakeHub, run: Run) -> None:
    hub.cards["org/gguf"] = {"gguf": {"total": 194304, "architecture": "llama", "context_length": 64}}
    output = run("show", "hf.co/org/gguf")[1]
    assert rows_of(output)["architecture"] == "llama" and rows_of(output)["format"] == "GGUF Q8_0"
    assert [line.split()[0] for line in output.split("\n\n")[1].splitlines()[1:]] == ["m-F16.gguf", "m-Q8_0.gguf"]
    assert [line.endswith("  taken") for line in output.split("\n\n")[1].splitlines()[1:]] == [False, True]
    assert rows_of(run("show", "org/gguf:f16")[1])["format"] == "GGUF F16"


def test_a_repository_without_a_usual_file_shows_what_can_be_named(hub: FakeHub, run: Run) -> None:
    code, output, _ = run("show", "org/odd")
    assert code == 0 and "a-F16.gguf" in output and "none is the usual one: name one, as org/odd:TAG" in output


def test_a_path_is_shown_and_json_has_all_facts(
    hub: FakeHub, run: Run, tmp_path: Path, models: dict[str, dict[str, bytes]]
) -> None:
    (tmp_path / "m-F16.gguf").write_bytes(models["org/gguf"]["m-F16.gguf"])
    shown = json.loads(run("show", str(tmp_path / "m-F16.gguf"), "--json")[1])
    assert shown["model"] == shown["place"] == str(tmp_path / "m-F16.gguf")
    assert shown["facts"]["format"] == "GGUF F16" and shown["facts"]["template"] is None
    assert rows_of(run("show", str(tmp_path / "m-F16.gguf"))[1])["chat template"] == "no: it completes texts"


def test_offline_a_model_of_the_cache_is_shown_and_another_is_one_line(
    hub: FakeHub, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("pull", "org/gguf:F16")[0] == 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert rows_of(run("show", "org/gguf")[1])["model"] == "org/gguf:F16"
    code, _, said = run("show", "org/tiny")
    assert code == 2 and said.count("\n") == 1
    assert f"org/tiny is not in {tmp_path / 'hub'}, and HF_HUB_OFFLINE forbids to ask the hub" in said


@pytest.mark.parametrize(
    ("template", "abilities"),
    [
        ("{{ tools }}<think>", "text, tools, thinking"),
        ("{{ messages }}", "text, tools (by a general instruction)"),
    ],
)
def test_what_a_template_can_is_named(
    template: str, abilities: str, run: Run, hub: FakeHub, tmp_path: Path, models: dict[str, dict[str, bytes]]
) -> None:
    for name, content in models["org/tiny"].items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert rows_of(run("show", str(tmp_path))[1])["can"] == abilities
